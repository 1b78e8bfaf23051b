"""Whole trajectories compared with an oracle."""

ORDER = 140
