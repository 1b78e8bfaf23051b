"""Models by name."""

from .llama import Transformer

__all__ = ["Transformer"]
