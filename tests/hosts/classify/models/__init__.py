"""Importing this package registers the models and the dataset."""

from . import mixer, shapes, vit

__all__ = ["mixer", "shapes", "vit"]
