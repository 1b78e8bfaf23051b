"""Ranks that wait for one another, and runs that do not complete."""
