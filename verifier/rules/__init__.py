"""The contract: every rule, in the order in which its family's faults should be mended."""

from __future__ import annotations

from . import (
    checkpoint,
    clipping,
    compiling,
    data,
    device,
    environment,
    gradients,
    hang,
    init,
    mesh,
    optimizer,
    parity,
    precision,
    source,
    traffic,
    wrapping,
)
from .base import Rule

FAMILIES = (
    environment,
    wrapping,
    compiling,
    device,
    init,
    mesh,
    optimizer,
    precision,
    data,
    gradients,
    clipping,
    checkpoint,
    traffic,
    hang,
    parity,
    source,  # last: what is ignored for nothing is known when all others have judged
)
RULES: dict[str, Rule] = {cls.name: cls() for family in FAMILIES for cls in family.RULES}
