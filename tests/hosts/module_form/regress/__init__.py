"""Regression with FSDP2: a package whose training is run as `python -m regress.train`."""

SEED = 7
