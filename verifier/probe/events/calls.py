"""Calls of modules: how deep they are nested, which call is the script's own, and the samples that
a root is given.
"""

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
from ..tensor_fingerprint import row_hashes
from .models import Models, trained

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
EVALUATED = 1 << 14  # samples that are recorded of a rank
Evaluations = set[tuple[tuple[tuple[str, int], ...], int]]  # lines of the stack, sample


def _holds_gradients(session: Session) -> bool:
    """Whether any parameter has a gradient, reduced, or not yet, or over one of two mesh dims (HSDP
    that accumulates).
    """
    if any(slot.unsynced or slot.param.grad is not None for slot in session.all_slots()):
        return True
    return any(not_all_reduced(group) for _, root in session.roots for _, group in groups(root))


def _evaluated(session: Session, known: Evaluations, given: list[torch.Tensor]) -> None:
    lines = tuple((place.file, place.line) for place in session.frames.stack())
    rows = list(dict.fromkeys(row for row in row_hashes(given) if (lines, row) not in known))
    known.update((lines, row) for row in rows)
    if rows:
        session.write(Evaluated(rows=rows, lines=list(lines), at_line=session.here()))


def install(session: Session) -> None:
    models = session.one(Models)
    evaluated: Evaluations = set()

    def leave() -> None:
        session.depth -= 1

    def before(call: Call) -> Leave:
        if session.depth == 0:
            session.publish(
                "call", call.args[0], lambda: tensors.tensors((call.args[1:], call.kwargs))
            )
        session.depth += 1
        return leave

    def called(module: nn.Module, given: Callable[[], list[torch.Tensor]]) -> None:
        if isinstance(module, DistributedDataParallel) and not session.stand_in:
            # of a script that was converted to FSDP2: the same names as after
            module = module.module
        if session.in_backward or all(p.device.type == "meta" for p in module.parameters()):
            return
        if not models.holds(module):
            models.adopt(module)
        if all(module is not root for _, root in session.roots):
            return
        if not torch.is_grad_enabled():
            if trained(module) and len(evaluated) < EVALUATED:
                _evaluated(session, evaluated, given())
            return
        if not module.training:
            session.rows_in_eval += row_hashes(given())
            return
        if session.micro and not _holds_gradients(session):
            session.micro = 0
            session.write(Cleared(step=session.step_number()))
        if session.random_state is None:
            session.random_state = random_state()
        everything = given()
        samples = [
            tensor for tensor in everything if tensor.grad_fn is None
        ]  # not what another model has made of them
        session.rows += row_hashes(samples if samples or session.rows else everything)
        session.tokens += max(
            (tensor.numel() for tensor in samples if tensor.dtype in INTEGERS), default=0
        )

    session.around("torch.nn:Module.__call__", before=before)
    session.subscribe("call", called)
