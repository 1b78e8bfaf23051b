"""Gradient norms and clipping."""

ORDER = 110
