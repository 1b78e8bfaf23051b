"""Which GPUs a run sees: runs that go on side by side have none in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"


def free(world: int, total: int, taken: Collection[int]) -> list[int]:
    """One GPU for each of `world` ranks, of those from 0 to `total` - 1 that no other run has;
    fewer where they share.
    """
    return [number for number in range(total) if number not in taken][:world]


def names(total: int, visible: str | None) -> list[str]:
    """What CUDA calls the GPUs that there are; `visible` is the CUDA_VISIBLE_DEVICES of the
    launcher.
    """
    return [name for name in (visible or "").split(",") if name] or [
        str(number) for number in range(total)
    ]


def environment(devices: Sequence[int], total: int, visible: str | None) -> dict[str, str]:
    """What makes the ranks of a run see these GPUs alone; nothing where they are not allotted, or
    are all that there are.
    """
    if not devices or len(devices) == total:
        return {}
    known = names(total, visible)
    return {VARIABLE: ",".join(known[number] for number in devices)}


def too_few(unused: int) -> str:
    """What a report says of GPUs that were not used; "" if there are none."""
    there = (
        f"{unused} CUDA device{'s are' if unused > 1 else ' is'} there, not one for each rank of"
        " the largest run"
    )
    return f"{there} (`--device cuda --oversubscribe` lets ranks share them)" if unused else ""
