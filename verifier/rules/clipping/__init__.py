"""Gradient norms and clipping."""
