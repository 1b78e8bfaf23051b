"""Accumulation, scaling and clearing of gradients."""
