"""Accumulation, scaling and clearing of gradients."""

ORDER = 100
