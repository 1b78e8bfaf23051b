"""The contract: every rule, in the order in which its family's faults should be mended."""

from __future__ import annotations

from . import (
    checkpoint,
    clipping,
    data,
    environment,
    gradients,
    hang,
    init,
    mesh,
    optimizer,
    parity,
    precision,
    traffic,
    wrapping,
)
from .base import Rule

FAMILIES = (
    environment,
    wrapping,
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
)
RULES: dict[str, Rule] = {cls.name: cls() for family in FAMILIES for cls in family.RULES}
