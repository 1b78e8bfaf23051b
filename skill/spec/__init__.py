"""The spec: what a person writes down about a training project, checked before anything is built
from it.
"""

from __future__ import annotations

from ...verifier.config.reading.problems import NotValid as SpecError
from ...verifier.config.reading.problems import Problem
from .loading import load, parse
from .model import Spec

__all__ = ["Problem", "Spec", "SpecError", "load", "parse"]
