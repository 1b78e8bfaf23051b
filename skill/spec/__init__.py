"""The spec: what a person writes down about a training project, checked before anything is built from it."""

from __future__ import annotations

from .loading import load
from .model import (
    SGD,
    AdamW,
    Checkpoint,
    DecoderModel,
    ImportModel,
    Parallel,
    Precision,
    Schedule,
    Spec,
    SyntheticData,
    TextData,
    Train,
    Verify,
)
from .problems import Problem, SpecError

__all__ = [
    "SGD",
    "AdamW",
    "Checkpoint",
    "DecoderModel",
    "ImportModel",
    "Parallel",
    "Precision",
    "Problem",
    "Schedule",
    "Spec",
    "SpecError",
    "SyntheticData",
    "TextData",
    "Train",
    "Verify",
    "load",
]
