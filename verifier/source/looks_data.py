"""What several detectors on data ask of the sources."""

from __future__ import annotations

SAMPLER = "data.DistributedSampler"
