"""Runs inside a rank; records and never judges.

Only the launched process imports it, and with it torch.
"""
