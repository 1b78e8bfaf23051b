"""The survey run: how far the script comes, by its lines, steps, saves and backwards.

Its samples and orders are recorded beside (events/batches.py, events/data.py).
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
from ..compat.tensors import elements, local, plain
from ..dispatcher import Call, Leave
from ..line_coverage import Lines
from ..measures import writes
from ..optimizer_ids import Turns
from ..passing_errors import PassingErrors
from ..session import Session
from .backward import BACKWARD

_STILL = 4096  # names
_SAMPLED = 64  # elements of a parameter by which its values are known again
STEPS = 40  # of which each is reported; later ones only if they reach new lines


class Weights:
    """The parameters and buffers of the sharded modules, compared with those at the first step."""

    def __init__(self) -> None:
        self.models: list[weakref.ref[nn.Module]] = []
        self.at_end = ""  # their digest as the process group is destroyed
        self.still: list[str] = []  # names of those that are then as at the first step
        self._first: set[tuple[str, str]] = set()  # (name, digest) at the first step
        self._written = 0  # how often they had been written by the last optimizer step
        self._after: list[torch.Tensor] = []  # some elements of each, after the last step
        self.between: set[str] = set()  # names of those that got other values between steps

    def shard(self, call: Call) -> None:
        """Modules are given to `fully_shard`."""
        given = call.given(0, "module")
        modules = given if isinstance(given, list | tuple) else [given]
        self.models.extend(weakref.ref(module) for module in modules)

    def begin(self) -> None:
        """The first step is about to be made."""
        self._first = {(name, _digest([tensor])) for name, tensor in _named(self.models)}

    def stepped(self) -> None:
        """An optimizer has stepped."""
        found = _named(self.models)
        self._written = writes(tensor for _, tensor in found)
        self._after = _some(tensor for _, tensor in self._params())

    def stepping(self) -> None:
        """An optimizer is about to step."""
        if not self._after:
            return
        params = self._params()
        now = _some(tensor for _, tensor in params)
        if len(now) == len(self._after) == len(params) and not _same(self._after, now):
            pairs = zip(params, self._after, now, strict=True)
            self.between |= {
                name for (name, _), before, after in pairs if not torch.equal(before, after)
            }

    def _params(self) -> list[tuple[str, nn.Parameter]]:
        found = _named(self.models)
        return [(name, tensor) for name, tensor in found if isinstance(tensor, nn.Parameter)]

    def end(self, made_steps: bool) -> None:
        """The process group is about to be destroyed."""
        found = _named(self.models)
        tensors = [tensor for _, tensor in found]
        # else the script has put others in their place, such as the best
        trained = not made_steps or writes(tensors) == self._written
        self.at_end = _digest(tensors) if trained else ""
        same = {name for name, tensor in found if (name, _digest([tensor])) in self._first}
        self.still = sorted(same)[:_STILL]

    def trainable(self) -> int:
        """How many parameters of the modules that still exist are trained."""
        alive = {module for one in self.models if (module := one()) is not None}
        return sum(param.requires_grad for module in alive for param in module.parameters())


class Survey:
    """Counts steps and backwards; what is trained before the sharded model does not count."""

    def __init__(self, session: Session, lines: Lines) -> None:
        self.session, self.lines = session, lines
        self.weights = Weights()
        self.errors = PassingErrors(session, lines, self._made)
        self.backwards = 0  # since the last report
        self.trained = False  # whether any backward has begun
        self.sharded = False  # whether `fully_shard` was called
        # the optimizers without shards that have stepped before any with shards
        self.plain: set[int] = set()
        self.begun = False  # whether an optimizer with shards has stepped
        self.apart = False  # whether only `plain` ones stepped before it, which are done

    def report(self, ended: bool = False) -> None:
        """Write what is new: after a step, or at the end."""
        session, weights = self.session, self.weights
        steps = self._made(ended)
        new, sides = self.lines.new(), self.lines.sides.new()
        if new or sides or steps <= STEPS or ended or self.errors.open or weights.between:
            session.write(
                Reached(
                    steps=steps,
                    lines=new,
                    sides=sides,
                    backwards=self.backwards,
                    trainable=weights.trainable(),
                    ended=ended,
                    weights=weights.at_end if ended else "",
                    still=weights.still if ended else [],
                    apart=self.apart,
                    between=sorted(weights.between)[:_STILL],
                )
            )
            weights.between.clear()
        self.backwards = 0
        if not ended:
            self.errors.stepped()

    def end(self) -> None:
        """The script has ended."""
        self.errors.end()
        self.report(ended=True)

    def _made(self, ended: bool = False) -> int:
        """The steps that were made."""
        progress = self.session.progress
        return max(progress.step_number() - 1, progress.own - (not ended))

    def _begin(self) -> None:
        """The first step is about to be made, of all or of the sharded model."""
        self.weights.begin()
        self.errors.begin()
        self.session.write(
            Reached(
                steps=0,
                lines=self.lines.new(),
                sides=self.lines.sides.new(),
                backwards=self.backwards,
                stack=self.session.frames.stack(),
                sharded=self.sharded,
            )
        )
        self.lines.again()

    def stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step."""
        session = self.session
        session.publish("stepping", optimizer, False)
        self.weights.stepping()
        first = not session.progress.optimizers
        if _holds_shards(optimizer):
            if not self.begun and self.plain:  # what was trained until now is another model
                first = self.apart = True
                session.progress.optimizers = Turns()
            self.begun = True
        elif self.sharded and not self.begun:
            self.plain.add(id(optimizer))
        else:
            self.apart = self.apart and id(optimizer) not in self.plain
        if first:
            session.progress.own = 0
            self._begin()

    def stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer has stepped."""
        session = self.session
        self.weights.stepped()
        if not self.backwards and (self.trained or not _has_gradients(optimizer)):
            # a helper creates the state of a new optimizer so, or another one uses the same
            # gradients
            return
        turn = session.progress.optimizers.at_step(optimizer, session.frames.lines(), trained=True)
        turn.begun += 1
        if turn.number == 0:
            self.report()

    def sharding(self, call: Call) -> None:
        """`fully_shard` is about to be applied."""
        if not self.sharded:  # what was trained until now is another model
            self.sharded, self.session.progress.own = True, 0
            self.session.progress.optimizers = Turns()
            self.errors.sharding()
        self.weights.shard(call)

    def destroying(self, call: Call) -> None:
        """The process group is about to be destroyed."""
        self.weights.end(bool(self.session.progress.optimizers))

    def backward(self, call: Call) -> Leave | None:
        """A backward is about to begin."""
        self.trained = True
        self.errors.backward()
        progress = self.session.progress
        if not progress.optimizers:  # each backward may be a step that the script makes itself
            progress.own += 1
            if progress.own == 1:
                self._begin()
            else:
                self.report()
        self.backwards += 1
        return None


def install(session: Session) -> None:
    """Report after each step, and at the end, what is new.

    The lines are those that rank.py has watched from the beginning.
    """
    if session.lines is None:
        return
    survey = Survey(session, session.lines)
    survey.errors.start()
    session.subscribe("ended", survey.end)
    session.around("torch.distributed.fsdp:fully_shard", before=survey.sharding)
    session.around("torch.distributed:destroy_process_group", before=survey.destroying)
    session.around(BACKWARD, before=survey.backward)
    register_optimizer_step_pre_hook(session.guarded(survey.stepping))
    register_optimizer_step_post_hook(session.guarded(survey.stepped))


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


@torch.no_grad()
def _some(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """A copy of some elements of this rank's part of each parameter."""
    flat = [elements(plain(local(param.detach()))).reshape(-1) for param in params]
    return [
        part[:: max(1, part.numel() // _SAMPLED)].to(torch.float64, copy=True)
        for part in flat
        if part.device.type != "meta"
    ]


def _same(before: list[torch.Tensor], now: list[torch.Tensor]) -> bool:
    """Whether all values are the same, by one comparison for each device."""
    for device in {one.device for one in now}:
        known = [one for one in before if one.device == device]
        found = [one for one in now if one.device == device]
        if not torch.equal(torch.cat(known), torch.cat(found)):
            return False
    return True


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
