"""State beside the weights: at the first forward of each step, every value that the frames of the
training loop can reach (`reachable_values.py`). Rules decide which of them matter.
"""

import re
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...launch.request import ONE_PROCESS
from ...trace.events import BuffersRead, EditedGradients, Held, KeptGradients, Place, State
from ...trace.sketches import difference
from ..compat.groups import Slot
from ..compat.tensors import address, layout, local, version
from ..dispatcher import Call
from ..measures import element_hash
from ..reachable_values import Walk
from ..session import Session
from ..tensor_fingerprint import sketch
from .manual_optimizer_steps import FORWARDS, OwnUpdates

# Values that are kept of a rank; what comes later is not compared, so models and optimizers come
# first.
LEAVES = 512  # values that are kept of a rank
_NAMES = 32
_MODEL = r"^model\d+\."  # before the names of a model that is not the first


@dataclass
class _Consumed:
    """A gradient that an optimizer has used; where a later backward found it as it was."""

    digest: int
    found: Place | None = None


class Watch:
    """What this rank has recorded of its state, and of its gradients since the last backward."""

    def __init__(self, session: Session) -> None:
        self.session = session
        # path -> what distinguishes a value from the last one
        self.known: dict[str, tuple[object, ...]] = {}
        self.evaluations = 0
        self.due = True  # whether the state of this step is not recorded yet
        self.ran = False  # whether a backward has ended since
        self.trained = False  # whether any has begun
        # path -> tensors of 16 bits as they were at the last step
        self.coarse: dict[str, torch.Tensor] = {}
        # by an optimizer, and not cleared or changed since
        self.consumed: dict[str, _Consumed] = {}
        self.read: dict[tuple[str, bool], tuple[int, int]] = {}  # of buffers, when last read

    def called(self, module: nn.Module, given: object) -> None:
        """A module is called by the script."""
        if any(module is root for _, root in self.session.roots):
            if torch.is_grad_enabled() or self.session.request.own_steps == FORWARDS:
                self._record()
            else:
                self.evaluations += 1
                self._buffers_read(saved=False)

    def saves(self, call: Call) -> None:
        """The state of a model is taken."""
        if any(call.args[0] is root for _, root in self.session.roots):
            self._buffers_read(saved=True)

    def _buffers_read(self, saved: bool) -> None:
        session = self.session
        found: dict[str, Held] = {}
        for name, root in session.roots:
            for key, buffer in root.named_buffers():
                path = f"{name.rstrip('.') or 'model'}.{key}"
                if not _is_read(buffer):
                    continue
                token = (buffer.data_ptr(), version(buffer))
                if self.read.get((path, saved)) != token:
                    self.read[path, saved] = token
                    with torch.no_grad():
                        found[path] = _held(buffer, "module", session.rank)
        step = session.progress.step_number()
        if found and step <= session.request.steps + 1:
            record = BuffersRead(step=step, values=found, saved=saved, at_line=session.here())
            session.write(record)

    def before_backward(self) -> None:
        """A backward begins: the first of a step records the state, if no forward has, others what
        was done to their gradients.
        """
        session, self.trained = self.session, True
        if not session.roots:
            return
        with torch.no_grad():
            slots = session.all_slots()
            self._found(slots)
            if session.progress.step_number() > session.request.steps:
                return
            if session.progress.micro == 0:
                self._record()  # of a model that is called in other ways than by its forward
            else:
                self._edited(slots)

    def after_backward(self, tensors: object) -> None:
        """A backward has ended."""
        self.ran = True

    def stepping(self, optimizer: Optimizer, closure: bool) -> None:
        """An optimizer is about to step: in a training without backward this is where its state is
        recorded.
        """
        if self.due and not (closure or self.trained) and self.session.roots:
            self._record()

    def stepped(self, optimizer: Optimizer | OwnUpdates) -> None:
        """An optimizer has consumed the gradients of its parameters, of which some were consumed
        before.
        """
        session = self.session
        self.due = True
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        step = session.progress.optimizers.of(optimizer).begun
        if step > session.request.steps:
            return
        own = {
            s.name: s.param.grad
            for s in session.all_slots()
            if id(s.param) in held and s.param.grad is not None
        }
        twice = [name for name in own if name in self.consumed and self.consumed[name].found]
        if twice:
            line = self.consumed[twice[0]].found
            session.write(KeptGradients(step=step, names=twice[:_NAMES], at_line=line))
        self.consumed |= {name: _Consumed(element_hash(grad)) for name, grad in own.items()}

    def _found(self, slots: list[Slot]) -> None:
        """A backward begins: which consumed gradients are still there.

        It adds to them, unless they are cleared afterwards.
        """
        if not self.consumed:
            return
        line = self.session.here()
        for slot in slots:
            if slot.name in self.consumed:
                known, now = self.consumed[slot.name], slot.param.grad
                if (
                    now is None
                    or not bool(local(now).count_nonzero())
                    # A gradient that was changed since its step (faded on purpose) is not one that
                    # was forgotten.
                    or not (known.found or known.digest == element_hash(now))
                ):
                    del self.consumed[slot.name]
                else:
                    known.found = known.found or line

    def _edited(self, slots: list[Slot]) -> None:
        factors: dict[str, float | None] = {}
        for slot in slots:
            before, grad = self.session.gradients.last.get(slot.name), slot.param.grad
            if before is None:
                continue
            now = sketch(grad) if grad is not None else [0.0] * len(before)
            # One float32 rounding of a gradient: a smaller difference is that of the sketch itself.
            if difference(now, before) > 1e-7 * max(before[0], now[0]) ** 0.5:
                factor = (now[0] / before[0]) ** 0.5 if before[0] > 0.0 else 0.0
                straight = (
                    difference(now, [factor * x for x in before])
                    # Within this the edit scales the gradient as a whole; a clear is a factor of 0,
                    # surgery changes the direction (exam round 1: gradients cleared or scaled
                    # between micro-batches (SAM, gradient surgery)).
                    <= 1e-3 * max(now[0], 1e-30) ** 0.5
                )
                factors[slot.name] = factor if straight or factor == 0.0 else None
        if factors:
            session = self.session
            some = dict(list(factors.items())[:_NAMES])
            session.write(
                EditedGradients(
                    step=session.progress.step_number(),
                    micro=session.progress.micro + 1,
                    factors=some,
                    at_line=session.here(),
                )
            )

    def _record(self) -> None:
        session = self.session
        # Gradients were thrown away: it was a dry run, and the step's state is that of the next
        # forward (zoo/dry_run).
        begun_again = self.ran and session.progress.micro == 0
        if not (self.due or begun_again) or session.progress.step_number() > session.request.steps:
            return
        self.due = self.ran = False
        with torch.no_grad():
            self._write(session, Walk(session))

    def _write(self, session: Session, walk: Walk) -> None:
        found, gone = self._changed(walk)
        trained = [
            (name, root)
            for name, root in session.roots
            if any(p.requires_grad for p in root.parameters())
        ]
        session.write(
            State(
                step=session.progress.step_number(),
                values=found,
                gone=gone,
                evaluations=self.evaluations,
                frozen=self._frozen(walk),
                in_eval=[one for name, root in trained for one in _in_eval(name, root)][:_NAMES],
                function=walk.function,
                at_line=session.here(),
            )
        )

    def _changed(self, walk: Walk) -> tuple[dict[str, Held], list[str]]:
        """The values that are new or others than they were, by path; the paths that are gone."""
        found: dict[str, Held] = {}
        paths: set[str] = set()
        for path, holder, value in chain(walk.watched(), walk.leaves()):
            if len(paths) >= LEAVES:
                break
            paths.add(path)
            if self._is_new(path, value):
                found[path] = replace(
                    _held(value, holder, self.session.rank),
                    lost=self._lost(path, value, walk),
                    live=_is_live(value, holder, walk),
                )
        gone = [path for path in self.known if path not in paths and not path.startswith("frozen ")]
        for path in gone:
            del self.known[path]
        return found, gone

    def _frozen(self, walk: Walk) -> dict[str, float]:
        """What changes of frozen parameters have lost, of those in 16 bits."""
        frozen = {}
        for slot in self.session.all_slots():
            if not slot.param.requires_grad and self._is_new(f"frozen {slot.name}", slot.param):
                lost = self._lost(f".{slot.name}", slot.param, walk)
                if lost is not None:
                    frozen[slot.name] = lost
        return frozen

    def _is_new(self, path: str, value: object) -> bool:
        token = _token(value)
        if self.known.get(path) == token:
            return False
        self.known[path] = token
        return True

    def _lost(self, path: str, value: object, walk: Walk) -> float | None:
        """Of the elements of a 16-bit tensor named like a float32 parameter and apart from it, how
        many this change left as they were.
        """
        if not isinstance(value, torch.Tensor) or value.dtype not in (
            torch.bfloat16,
            torch.float16,
        ):
            return None
        path = re.sub(rf"^\.{_MODEL[1:]}", ".", path) if path.startswith(".") else path
        now, last = local(value).detach().clone(), self.coarse.get(path)
        self.coarse[path] = now
        names = ((re.sub(_MODEL, "", name), param) for name, param in walk.weights)
        followed = next(
            (param for name, param in names if path.endswith((f"'{name}']", f".{name}"))), None
        )
        if (
            last is None
            or followed is None
            or now.shape != followed.shape
            or last.shape != now.shape
        ):
            return None
        unit = torch.finfo(now.dtype).eps * last.abs().float()
        # An element stands still only if it should have moved by more than two units of 16 bits:
        # then the average loses updates (exam round 6 and 7: an average kept in bfloat16; round 9:
        # a teacher in bfloat16).
        apart = ((followed.float() - last.float()).abs() > 2 * unit) & (last != 0)
        return float((apart & (now == last)).sum()) / max(1, int(apart.sum()))


def _in_eval(name: str, root: nn.Module) -> list[str]:
    """The modules in eval mode where that matters; the root first, if all of them are."""
    modules = [(n, m) for n, m in root.named_modules() if n and _has_modes(m)]
    found = [name + n for n, m in modules if not m.training]
    whole = len(found) == len(modules) and not root.training
    return [name, *found] if whole else found


def _has_modes(module: nn.Module) -> bool:
    """Whether train and eval mode can differ: not for a container whose own forward does not ask
    for its mode.
    """
    forward = getattr(type(module).forward, "__code__", None)
    names = forward.co_names if forward is not None else ()
    # A container in eval mode whose forward does not ask for its mode computes the same (exam round
    # 1).
    return "training" in names or next(module.children(), None) is None


def _is_read(buffer: torch.Tensor) -> bool:
    """Whether a buffer is a plain tensor of this rank whose elements can be read."""
    plain = type(buffer) is torch.Tensor and not (buffer.is_meta or buffer.is_inference())
    return plain and buffer.is_floating_point() and buffer.numel() > 0


def _is_live(value: object, holder: str, walk: Walk) -> bool:
    """Whether what may be a snapshot lies in the memory of the weights."""
    # so is its `to_local`
    own = isinstance(value, nn.Parameter) and type(value) is not torch.Tensor
    # Only what the loop or an object keeps as a plain tensor can be a snapshot in the memory of the
    # weights (exam round 3, missed: two snapshots that alias the weights).
    if holder not in ("local", "object") or not isinstance(value, torch.Tensor) or own:
        return False
    return address(value) in walk.memory


def _held(value: Any, holder: str, rank: int) -> Held:
    if not isinstance(value, torch.Tensor):
        kind = "generator" if holder == "generator" else type(value).__name__
        return Held(holder=holder, value=float(value), dtype=kind)
    placed, dtype = layout(value, rank), str(value.dtype).removeprefix("torch.")
    if value.numel() == 1 and not placed.sharded:
        return Held(holder=holder, value=float(local(value).real), dtype=dtype)
    return Held(
        holder=holder,
        sketch=sketch(value),
        numel=value.numel(),
        sharded=placed.sharded,
        copy=placed.copy if placed.sharded else 0,
        dtype=dtype,
    )


def _token(value: Any) -> tuple[object, ...]:
    """What distinguishes a value from another.

    In-place operations on a DTensor count in no version, so that elements are looked at.
    """
    return (value,) if not isinstance(value, torch.Tensor) else (value.shape, element_hash(value))


def install(session: Session) -> None:
    """Subscribe to backwards, steps and calls of the script."""
    if session.request.mode in ONE_PROCESS:
        return
    watch = Watch(session)
    session.subscribe("before backward", watch.before_backward)
    session.subscribe("backward", watch.after_backward)
    session.subscribe("stepping", watch.stepping, first=True)
    for notice in ("stepped", "updated"):
        session.subscribe(notice, watch.stepped)
    session.subscribe("call", watch.called)
    session.around("torch.nn:Module.state_dict", before=watch.saves)
