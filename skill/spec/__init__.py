"""The spec: what a person writes down about a training project, checked before anything is built from it."""

from __future__ import annotations

from .loading import load, parse
from .model import DecoderModel, Spec
from .problems import Problem, SpecError

__all__ = ["DecoderModel", "Problem", "Spec", "SpecError", "load", "parse"]
