"""What runs on every node, and what both ends of a connection to one need: the standard library only."""
