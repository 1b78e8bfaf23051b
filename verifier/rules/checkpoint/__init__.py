"""Saves, loads, resumes and what survives a crash."""
