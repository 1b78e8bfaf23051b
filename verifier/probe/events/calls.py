"""Calls of modules: how deep they are nested, which call is the script's own, and the samples that
a root is given.
"""

import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...trace.events import Cleared, Evaluated
from ..compat import tensors
from ..compat.groups import groups, not_all_reduced
from ..dispatcher import Call, Leave
from ..measures import random_state
from ..session import Session
from ..tensor_fingerprint import row_hashes, sums
from .models import Models, trained

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
EVALUATED = 1 << 14  # samples that are recorded of a rank
Evaluations = set[tuple[tuple[tuple[str, int], ...], int]]  # lines of the stack, sample


class Calls:
    """The calls of modules of one rank."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.progress = session.progress
        self.models = session.one(Models)
        self.evaluated: Evaluations = set()

    def before(self, call: Call) -> Leave | None:
        """A module is about to be called."""
        progress = self.progress
        if progress.elsewhere and self.session.roots:
            return None
        if progress.depth == 0:
            self.session.publish(
                "call", call.args[0], lambda: tensors.tensors((call.args[1:], call.kwargs))
            )
        progress.depth += 1
        return self._leave

    def _leave(self) -> None:
        self.progress.depth -= 1

    def called(self, module: nn.Module, given: Callable[[], list[torch.Tensor]]) -> None:
        """A module is called by the script: what is a root becomes one, with its samples."""
        session, models = self.session, self.models
        if isinstance(module, DistributedDataParallel) and not hasattr(module, "stands_in"):
            # of a script that was converted to FSDP2, or has a part in DDP: the same names as after
            module = module.module
        if self.progress.in_backward or all(p.device.type == "meta" for p in module.parameters()):
            return
        if not models.holds(module):
            models.adopt(module)
            self.progress.thread = threading.get_ident()
        if all(module is not root for _, root in session.roots):
            return
        if not torch.is_grad_enabled():
            if trained(module) and len(self.evaluated) < EVALUATED:
                self._evaluates(given())
        elif not module.training:
            session.batch.rows_in_eval += row_hashes(given())
        else:
            self._trains(given())

    def _trains(self, everything: list[torch.Tensor]) -> None:
        """A forward whose samples the next backward is made of, as a rule."""
        session, progress, batch = self.session, self.progress, self.session.batch
        if progress.micro and not _holds_gradients(session):
            progress.micro = 0
            session.write(Cleared(step=progress.step_number()))
        if batch.random_state is None:
            batch.random_state = random_state()
        # not what another model has made of them
        samples = [tensor for tensor in everything if tensor.grad_fn is None]
        batch.rows += row_hashes(samples if samples or batch.rows else everything)
        for tensor in samples:
            batch.parts.append([tensor.numel(), *sums(tensor)])
        batch.tokens += max(
            (tensor.numel() for tensor in samples if tensor.dtype in INTEGERS), default=0
        )

    def _evaluates(self, given: list[torch.Tensor]) -> None:
        session, known = self.session, self.evaluated
        lines = tuple((place.file, place.line) for place in session.frames.stack())
        rows = list(dict.fromkeys(row for row in row_hashes(given) if (lines, row) not in known))
        known.update((lines, row) for row in rows)
        if rows:
            session.write(Evaluated(rows=rows, lines=list(lines), at_line=session.here()))


def _holds_gradients(session: Session) -> bool:
    """Whether any parameter has a gradient, reduced, or not yet, or over one of two mesh dims (HSDP
    that accumulates).
    """
    if any(slot.unsynced or slot.param.grad is not None for slot in session.all_slots()):
        return True
    return any(not_all_reduced(group) for _, root in session.roots for _, group in groups(root))


def install(session: Session) -> None:
    calls = Calls(session)
    session.around("torch.nn:Module.__call__", before=calls.before)
    session.subscribe("call", calls.called)
