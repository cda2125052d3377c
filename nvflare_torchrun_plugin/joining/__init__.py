"""Nodes that dial in: the desk in the client job, the way to it, and the node's side."""
