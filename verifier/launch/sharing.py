"""Several ranks on one GPU (`--oversubscribe`).

NCCL refuses two ranks with one device if host and bus are the same.

First choice: NCCL over loopback, each rank with a host name of its own (`NCCL_HOSTID`) and the
environment of a node with one GPU.
Second: gloo, which copies CUDA tensors through the host. Which one is decided by trying
(backend_probe.py), and stands in the report.
"""

from __future__ import annotations

from collections.abc import Callable

from .devices import names as devices_named


def decide(ranks: int, devices: int, asked: bool, works: Callable[[str], bool]) -> str:
    """How `ranks` share `devices`: "" (they need not), "nccl", "gloo", or "none" where neither
    works.
    """
    if not asked or devices == 0 or ranks <= devices:
        return ""
    return next((backend for backend in ("nccl", "gloo") if works(backend)), "none")


def environment(rank: int, world: int, devices: int, visible: str | None) -> dict[str, str]:
    """What a rank that shares a GPU gets beside, or instead of, what torchrun gives: a node of its
    own with one device.

    `visible` is the CUDA_VISIBLE_DEVICES that there is already.
    """
    names = devices_named(devices, visible)
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(world),
        "CUDA_VISIBLE_DEVICES": names[rank % len(names)],
        "NCCL_HOSTID": f"fsdp2-rank{rank}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
    }


def described(backend: str, ranks: int, devices: int) -> str:
    """The backend as it stands in a report."""
    how = (
        "nccl over loopback, a host name for each rank"
        if backend == "nccl"
        else "gloo on CUDA tensors instead of nccl"
    )
    return f"{how}: {ranks} ranks on {devices} CUDA device{'s' if devices > 1 else ''}"
