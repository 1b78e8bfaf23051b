"""The survey run: how far the script comes, by its lines, steps, saves and backwards.

Beside its saves nothing else is recorded.
"""

import hashlib
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...trace.events import Reached
from ..compat.groups import slots
from ..compat.tensors import local, plain
from ..dispatcher import Call, Leave
from ..measures import writes
from ..optimizer_ids import Turns
from ..session import Session
from .backward import BACKWARD

_STILL = 4096  # names
STEPS = 40  # of which each is reported; later ones only if they reach new lines


def install(session: Session) -> None:
    """Report after each step, and at the end, what is new.

    The lines are those that rank.py has watched from the beginning.
    """
    lines = session.lines
    if lines is None:
        return
    backwards, trained, sharded = 0, False, False
    # the optimizers without shards that have stepped before any with shards
    plain: set[int] = set()
    begun, apart = (
        False,
        False,
    )  # whether one with shards has stepped, and only `plain` ones before it, which are done
    models: list[weakref.ref[nn.Module]] = []
    weights, still, written = (
        "",
        list[str](),
        0,
    )  # `written`: how often the tensors had been by the last optimizer step
    first: set[tuple[str, str]] = set()  # (name, digest) of the tensors at the first step

    def report(ended: bool = False) -> None:
        nonlocal backwards
        steps, new = max(session.step_number() - 1, session.own - (not ended)), lines.new()
        if new or steps <= STEPS or ended:
            alive = [module for one in models if (module := one()) is not None]
            trainable = sum(
                param.requires_grad for module in {*alive} for param in module.parameters()
            )
            last, same = (weights, still) if ended else ("", [])
            session.write(
                Reached(
                    steps=steps,
                    lines=new,
                    backwards=backwards,
                    trainable=trainable,
                    ended=ended,
                    weights=last,
                    still=same,
                    apart=apart,
                )
            )
        backwards = 0

    def begin() -> None:
        nonlocal first
        first = {(name, _digest([tensor])) for name, tensor in _named(models)}
        stack = session.frames.stack()
        session.write(
            Reached(steps=0, lines=lines.new(), backwards=backwards, stack=stack, sharded=sharded)
        )
        lines.again()

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal begun, apart
        first = not session.optimizers
        if _holds_shards(optimizer):
            if not begun and plain:  # what was trained until now is another model
                first, apart, session.optimizers = True, True, Turns()
            begun = True
        elif sharded and not begun:
            plain.add(id(optimizer))
        else:
            apart = apart and id(optimizer) not in plain
        if first:
            session.own = 0
            begin()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal written
        written = writes(tensor for _, tensor in _named(models))
        if not backwards and (trained or not _has_gradients(optimizer)):
            # a helper creates the state of a new optimizer so, or another one uses the same
            # gradients
            return
        turn = session.optimizers.at_step(optimizer, session.frames.lines(), trained=True)
        turn.begun += 1
        if turn.number == 0:
            report()

    def sharding(call: Call) -> None:
        nonlocal sharded
        if not sharded:  # what was trained until now is another model
            sharded, session.own = True, 0
            session.optimizers = Turns()
        given = call.given(0, "module")
        models.extend(
            weakref.ref(module)
            for module in (given if isinstance(given, list | tuple) else [given])
        )

    def ends(call: Call) -> None:
        nonlocal weights, still
        found = _named(models)
        # else the script has put others in their place, such as the best
        trained = not session.optimizers or writes(tensor for _, tensor in found) == written
        weights = _digest(tensor for _, tensor in found) if trained else ""
        still = sorted({name for name, tensor in found if (name, _digest([tensor])) in first})[
            :_STILL
        ]

    def calls(call: Call) -> Leave | None:
        nonlocal backwards, trained
        trained = True
        if not session.optimizers:  # each backward may be a step that the script makes itself
            session.own += 1
            begin() if session.own == 1 else report()
        backwards += 1
        return None

    session.subscribe("ended", lambda: report(ended=True))
    session.around("torch.distributed.fsdp:fully_shard", before=sharding)
    session.around("torch.distributed:destroy_process_group", before=ends)
    session.around(BACKWARD, before=calls)
    register_optimizer_step_pre_hook(session.guarded(before))
    register_optimizer_step_post_hook(session.guarded(after))


def _named(models: Iterable[weakref.ref[nn.Module]]) -> list[tuple[str, torch.Tensor]]:
    """(name in the outermost of the sharded modules that hold it, tensor) of all parameters and
    buffers.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for module in (module for one in models if (module := one()) is not None):
        for name, tensor in (
            *((slot.name, slot.param) for slot in slots(module)),
            *module.named_buffers(),
        ):
            if len(name) >= len(found.get(id(tensor), ("",))[0]):
                found[id(tensor)] = (name, tensor)
    return list(found.values())


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of this rank's parts of tensors; "" where there are none, or none of this
    process.
    """
    digest, parts = hashlib.sha256(), 0
    for part in (plain(local(tensor.detach())) for tensor in tensors):
        if part.device.type != "meta":
            parts += 1
            # numpy() forbids FSDP to resize what it shares
            copy = part.cpu().clone(memory_format=torch.contiguous_format)
            digest.update(copy.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if parts else ""


def _has_gradients(optimizer: Optimizer) -> bool:
    """Whether a step uses gradients, which the script may have made without a backward (an
    evolution strategy).
    """
    grads = [
        param.grad
        for group in optimizer.param_groups
        for param in group["params"]
        if param.grad is not None
    ]
    return any(bool(local(grad).count_nonzero()) for grad in grads)


def _holds_shards(optimizer: Optimizer) -> bool:
    return any(
        isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]
    )
