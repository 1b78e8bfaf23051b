"""What becomes of a finding: tables of small pure functions, in their order (see judge.py)."""
