"""What a rank holds after each optimizer step, and the peak of its process so far, in bytes.

The peaks are measured and include the probe's own copies (of the weights before a step, of
gradients). A forked rank starts with pages that it shares with the launcher: `before` is the
resident size when the probe was installed.
"""

from collections.abc import Iterable
from pathlib import Path

import torch

from ...trace.events import Memory
from ..compat.tensors import local
from ..session import Session


def install(session: Session) -> None:
    before, real = resident("VmRSS"), not session.request.cuda_on_cpu

    def stepped(optimizer: torch.optim.Optimizer) -> None:
        params = [slot.param for slot in session.all_slots()]
        states = [
            v
            for one in session.progress.optimizers.alive()
            for state in one.state.values()
            for v in state.values()
        ]
        cuda = torch.cuda.max_memory_allocated() if real and torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        session.write(
            Memory(
                parameters=_bytes(params),
                gradients=_bytes(param.grad for param in params if param.grad is not None),
                optimizer=_bytes(
                    {
                        id(value): value for value in states if isinstance(value, torch.Tensor)
                    }.values()
                ),
                before=before,
                peak=resident("VmHWM"),
                cuda=cuda,
            )
        )

    session.subscribe("stepped", stepped)


def resident(field: str) -> int | None:
    """A number of bytes from /proc/self/status; None where there is none."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    return next(
        (int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:")), None
    )


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of the parts on this rank."""
    return sum((part := local(tensor)).numel() * part.element_size() for tensor in tensors)
