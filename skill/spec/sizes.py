"""Sizes of memory, as a spec and the command line write them: `80GiB`; a number alone is in GiB."""

from __future__ import annotations

import re

from ...verifier.config.devices import GIB
from ...verifier.config.reading.document import Document

UNITS = {"": GIB, "g": GIB, "m": GIB >> 10, "t": GIB << 10}
SIZE = re.compile(r"(\d+(?:\.\d+)?) *(?:([mgt])(?:ib)?)?", re.IGNORECASE | re.ASCII)
EXPECTED = "a size above 0, such as 80GiB (GiB, MiB and TiB are known, 80GB is 74.5GiB)"


def size(text: str) -> int | None:
    """Bytes of `80GiB`; None if this is no size."""
    found = SIZE.fullmatch(text.strip())
    return int(float(found[1]) * UNITS[(found[2] or "").lower()]) if found else None


def apply(document: Document) -> None:
    """Give `launch.device_memory` as a number of GiB, where it is a size with a unit."""
    launch = document.data.get("launch") if isinstance(document.data, dict) else None
    written = launch.get("device_memory") if isinstance(launch, dict) else None
    found = size(written) if isinstance(written, str) else None
    if isinstance(launch, dict) and found is not None:
        launch["device_memory"] = found / GIB
