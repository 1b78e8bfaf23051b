"""Dtypes of weights, compute and reduction."""
