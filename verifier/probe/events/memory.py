"""What a rank holds after each optimizer step, and the most that its process has had so far, in bytes.

The peaks are measured, and hold the probe's own copies too (of the weights before a step, of gradients). A forked rank begins with
pages that it shares with the launcher: `before` says how many were there when the probe was installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from ...trace.events import Memory
from ..compat.tensors import local
from ..session import Session

_STATUS = Path("/proc/self/status")


def install(session: Session) -> None:
    """Subscribe to steps."""
    before = resident("VmRSS")

    def stepped(optimizer: torch.optim.Optimizer) -> None:
        slots = session.all_slots()
        states = [
            value for one in session.optimizers_alive() for state in one.state.values() for value in state.values()
        ]
        tensors = {id(value): value for value in states if isinstance(value, torch.Tensor)}
        cuda = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        session.write(
            Memory(
                parameters=_bytes(slot.param for slot in slots),
                gradients=_bytes(slot.param.grad for slot in slots if slot.param.grad is not None),
                optimizer=_bytes(tensors.values()),
                before=before,
                peak=resident("VmHWM"),
                cuda=cuda,
            )
        )

    session.subscribe("stepped", stepped)


def resident(field: str) -> int | None:
    """A number of bytes from the kernel's account of this process; None where it gives none."""
    try:
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), None)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the parts on this rank."""
    return sum((part := local(tensor)).numel() * part.element_size() for tensor in tensors)
