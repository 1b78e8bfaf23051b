"""Text that needs no download, and its loader."""

from .corpus import Corpus
from .loader import IGNORE, Loader

__all__ = ["IGNORE", "Corpus", "Loader"]
