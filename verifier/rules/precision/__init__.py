"""Dtypes of weights, compute and reduction."""

ORDER = 80
