"""Queries on the sources that several detectors on data use."""

from __future__ import annotations

SAMPLER = "data.DistributedSampler"
