"""Trainer, callbacks, registry: the parts that do not know what is trained."""
