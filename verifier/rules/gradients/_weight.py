"""The weight of the loss that a step used, by what its criteria recorded."""

from __future__ import annotations

NO_TWIN = "no run in full precision made a step"
SAME = 1e-3  # relative: far above rounding, far below the smallest factor of two
