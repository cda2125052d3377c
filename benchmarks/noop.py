"""A training script that does nothing: what remains is the time of the launch."""
