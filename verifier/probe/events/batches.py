"""The samples of every backward, in the survey run: what is judged on all steps."""

import torch

from ...trace.events import Batch
from ..compat import tensors
from ..dispatcher import Call, Leave
from ..session import Session
from ..tensor_fingerprint import row_hashes
from .backward import BACKWARD

BATCHES = 4000  # that are recorded of a rank
ROWS = 64  # of a batch that are hashed
ELEMENTS = 1 << 20  # of a tensor that are hashed; of longer rows fewer


class Batches:
    """The samples that models were given in training mode since the last backward."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.depth = 0  # of the calls of modules and backwards that are running
        self.rows: list[int] = []
        self.size = 0
        self.left = BATCHES

    def calling(self, call: Call) -> Leave:
        """A module is about to be called."""
        module, self.depth = call.args[0], self.depth + 1
        if self.depth == 1:
            self.session.publish("call", module, list)
        outermost = self.depth == 1 and self.left > 0
        trains = outermost and module.training and torch.is_grad_enabled()
        if trains and next(module.parameters(), None) is not None:
            self._given(tensors.tensors((call.args[1:], call.kwargs)))
        return self._leave

    def _given(self, everything: list[torch.Tensor]) -> None:
        samples = [one for one in everything if one.grad_fn is None and one.dim() > 0]
        if not samples or samples[0].shape[0] == 0:
            return
        self.size += samples[0].shape[0]
        longest = max(one.numel() // max(one.shape[0], 1) for one in samples)
        most = min(ROWS - len(self.rows), max(1, ELEMENTS // max(longest, 1)))
        if most > 0:
            self.rows += row_hashes([one.detach()[:most] for one in samples])

    def _leave(self) -> None:
        self.depth -= 1

    def backward(self, call: Call) -> Leave:
        """A backward is about to begin; what is computed again within it is no new batch."""
        if self.depth == 0 and self.rows:
            progress = self.session.progress
            step = max(progress.step_number(), progress.own)
            self.session.write(Batch(step=step, rows=self.rows, size=self.size))
            self.rows, self.size, self.left = [], 0, self.left - 1
        self.depth += 1
        return self._leave


def install(session: Session) -> None:
    """Watch the survey run, not one of which only the end counts."""
    if not session.request.leave_starting_point:
        return
    batches = Batches(session)
    session.around("torch.nn:Module.__call__", before=batches.calling)
    session.around(BACKWARD, before=batches.backward)
