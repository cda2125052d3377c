"""Measurements of what the package costs, beside what it is compared with; ``make bench`` runs them all."""
