"""Replacements for functions that the script calls, so that its run can be compared, or can run on
this machine.
"""
