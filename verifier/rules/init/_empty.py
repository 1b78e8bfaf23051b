"""Memory that `to_empty` allocates."""

from __future__ import annotations

NOT_FILLED = "no run with NaN in the memory that to_empty allocates came to a forward"
