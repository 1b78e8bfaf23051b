"""What is looked for in the sources: one module for each family of rules, one function for each fault."""

from . import checkpoint, clipping, data, device, gradients, hang, init, mesh, misuse, optimizer, precision, wrapping
from .registry import DETECTORS

__all__ = ["DETECTORS"]
_ALL = (checkpoint, clipping, data, device, gradients, hang, init, mesh, misuse, optimizer, precision, wrapping)
