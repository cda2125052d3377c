"""What runs in every rank beside the script."""
