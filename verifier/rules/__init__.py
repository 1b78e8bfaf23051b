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
    hang_named,
    init,
    mesh,
    optimizer,
    parity,
    parity_resumed,
    precision,
    raised_mesh,
    raised_mixed,
    raised_model,
    raised_numbers,
    source,
    traffic,
    wrapping,
)
from .base import Rule

SILENT = (
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
)
RAISED = (raised_model, raised_mixed, raised_numbers, raised_mesh)
FAMILIES = (
    *SILENT,
    *RAISED,
    hang_named,
    hang,
    parity,
    parity_resumed,
    source,
)  # source last: what is ignored for nothing is known then
RULES: dict[str, Rule] = {cls.name: cls() for family in FAMILIES for cls in family.RULES}
