"""What a version of torch offers to a generated project, as examples showed on 2.7.1 to 2.14.1, two
of them on 2.15.0.
"""

from __future__ import annotations

import importlib.metadata

ASYNCHRONOUS = (2, 9)  # DefaultStager, which copies the state, is there from this version on
# torch.nn.functional.grouped_mm was run on 2.13.0; it needs rows of a multiple of 16 bytes
GROUPED_MM = (2, 13)
# a group of FSDP2 with frozen parameters of another type was run on 2.13.0
FROZEN_IN_ITS_OWN_TYPE = (2, 13)
# torch.distributed.set_timeout; the private function that it replaces warns from then on
SET_TIMEOUT = (2, 15)
# It clears what a second copy needs (pytorch issue 183413; run on 2.11.0 and 2.12.1).
STAGER_SERVES_ONCE = ((2, 11), (2, 12))


def chosen(torch: str | None) -> tuple[int, int]:
    """The version that a project is for: (2, 13) of "2.13"; of None, that of the installed
    torch.
    """
    major, minor = (torch or importlib.metadata.version("torch")).split(".")[:2]
    return int(major), int(minor)
