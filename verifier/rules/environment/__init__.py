"""Faults of this torch on this machine, not of the script."""
