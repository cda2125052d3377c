"""Faults that strike a group from within: the table of them, the script of its ranks, and what inflicts them."""
