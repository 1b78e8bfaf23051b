"""Whole trajectories compared with an oracle."""
