"""What is verified and what a team has decided about it: the target, verify.yaml and
pyproject.toml, policy.
"""
