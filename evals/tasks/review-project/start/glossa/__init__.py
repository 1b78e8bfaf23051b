"""A masked language model."""
