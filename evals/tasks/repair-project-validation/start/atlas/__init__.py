"""Pretraining of small language models in shards."""
