"""Trying a node group step by step, for `nvflare-torchrun doctor`."""
