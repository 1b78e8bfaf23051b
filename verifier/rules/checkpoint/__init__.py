"""Saves, loads, resumes and what survives a crash."""

ORDER = 120
