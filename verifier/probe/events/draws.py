"""Random tensors that the script's own lines draw in training, outside the forward of a model:
noise, times, positions.
"""

import functools

import torch

from ...launch.request import ONE_PROCESS
from ...trace.events import Drawn
from ..compat.tensors import local
from ..dispatcher import Call
from ..frames import caller
from ..session import Session
from ..tensor_fingerprint import row_hashes
from .randomness import FUNCTIONS

_OF_A_LINE = 6  # draws that are recorded of one line
_ELEMENTS = 1 << 20


def install(session: Session) -> None:
    """Subscribe to what draws, in the runs whose numbers are compared."""
    if session.request.mode in ONE_PROCESS:
        return
    progress = session.progress

    def drawn(call: Call, name: str) -> None:
        made = call.result
        # Draws within a forward are keyed by the rows in the compared runs; here only the script's
        # own lines count.
        inside = progress.depth > 0 or progress.in_backward or progress.in_step
        if (
            (inside and not progress.elsewhere)
            or not session.roots
            or not isinstance(made, torch.Tensor)
            # A single number is often one decision for all ranks (a size, a branch): all ranks must
            # draw it alike (exam round 8, missed: noise and latents that all ranks draw alike).
            or not 1 < made.numel() <= _ELEMENTS
        ):
            return
        # An initialisation is to be the same on all ranks.
        if made.device.type == "meta" or caller().f_code.co_filename.endswith("torch/nn/init.py"):
            return
        if (line := session.here()) is None or not session.first(
            (line.file, line.line, name), most=_OF_A_LINE
        ):
            return
        digest = row_hashes([local(made).detach().reshape(1, -1)])
        if digest:
            step = progress.step_number()
            session.write(
                Drawn(
                    step=step, function=name, shape=list(made.shape), digest=digest[0], at_line=line
                )
            )

    for target, name in FUNCTIONS.items():
        session.around(target, after=functools.partial(drawn, name=name))
