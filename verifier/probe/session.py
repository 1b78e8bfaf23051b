"""What one rank knows of the run while it goes on, and the records that it leaves.

The hooks of `hooks.py` call the `on_...` methods; nothing here judges. A *root* is a module that the script calls itself
(not from within another module) and that has parameters. A *step* is one `optimizer.step()`; a *micro-batch* one backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import OffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from . import outputs, starting_point, torchlib
from .measures import class_name, dtype_of, movement, optimizer_state, products, random_state, repeated_blocks
from .recorder import Recorder
from .sketch import row_hashes, sketch
from .stop import StopRun

STRESS = 1.0e6


def _unread(options: dict[str, Any]) -> list[str]:
    """Options of `fully_shard` that it takes and does nothing with, in words."""
    offload = options.get("offload_policy")
    told = []
    if offload and not isinstance(offload, OffloadPolicy):
        told.append(f"`offload_policy` is a {type(offload).__name__} and no CPUOffloadPolicy: nothing is offloaded")
    others = [type(thing).__name__ for thing in options.get("ignored_params") or () if not torch.is_tensor(thing)]
    if others:
        told.append(
            f"`ignored_params` holds no parameters but {', '.join(sorted(set(others)))}: nothing is ignored for it"
        )
    return told


class Session:
    """State of one rank in one run. `request` holds the fields of a `launch.request.Request`."""

    def __init__(self, request: dict[str, Any], rank: int, recorder: Recorder) -> None:
        self.request = request
        self.rank = rank
        self.recorder = recorder
        self.steps: int = request["steps"]
        self.stand_in: bool = request["mode"] == "ddp"
        self.alone: bool = request["mode"] == "alone"
        self.depth = 0
        self.in_backward = False
        self.backward_for = 1  # the step whose gradients the backward makes; an optimizer may step before it ends
        self.in_step = False
        self.waiting: torch.optim.Optimizer | None = None
        self.roots: list[tuple[str, nn.Module]] = []
        self.tops: list[weakref.ref[nn.Module]] = []
        self.filled: set[int] = set()
        self.micro = 0
        self.rows: list[int] = []
        self.criteria: list[dict[str, Any]] = []
        self.random_state: str | None = None
        self.grads: dict[str, list[float] | None] = {}
        self.optimizers: dict[int, tuple[int, int]] = {}
        self.living: list[weakref.ref[torch.optim.Optimizer]] = []
        self.sync_calls = 0
        self.before: dict[str, torch.Tensor] = {}
        self.stress: dict[str, torch.Tensor] | None = None
        self.inexact: set[str] = set()
        self.local = False
        self.stressed = 0
        self.stopped = 0

    # -- models -------------------------------------------------------------------------------------------------------

    def on_call(self, module: nn.Module, arguments: Callable[[], list[Any]]) -> None:
        """A module is called while no other is running; `arguments()` are the leaves of what it is given."""
        if isinstance(module, DistributedDataParallel) and not self.stand_in:
            module = module.module  # of a script that FSDP2 code was converted from: the same names as there
        if self.in_backward or all(p.device.type == "meta" for p in module.parameters()):
            return
        if all(module is not root for _, root in self.roots):
            self.adopt(module)
        if torch.is_grad_enabled() and module.training:
            if self.micro and not any(s.unsynced or s.param.grad is not None for s in self.all_slots()):
                self.micro = 0
                self.recorder.write("cleared", step=self.step_number())
            if self.random_state is None:
                self.random_state = random_state()
            tensors = [value for value in arguments() if isinstance(value, torch.Tensor)]
            self.rows += row_hashes(tensors)

    def adopt(self, root: nn.Module) -> None:
        """First call of a root: give it the common starting point or leave it for the others, and record what it is."""
        self.roots = [(name, old) for name, old in self.roots if all(old is not m for m in root.modules())]
        number = self._number(root)
        name = _root_name(number)
        self.roots.append((name, root))
        slots = torchlib.slots(root)
        untouched = {slot.name: sketch(slot.param) for slot in slots}
        loaded = starting_point.share(root, slots, self.request, self.rank, number)
        owners = {id(item): name + key for key, group in torchlib.groups(root) for item in group.fsdp_params}
        entries = [
            {**self._describe(name, slot, untouched[slot.name]), "group": owners.get(id(slot.fsdp))} for slot in slots
        ]
        buffers = [
            {
                "name": name + key,
                "shape": list(value.shape),
                "sketch": sketch(value),
                "unset": self._unset(value),
            }
            for key, value in root.named_buffers()
        ]
        groups = [{"module": name + key, "parameters": len(group.fsdp_params)} for key, group in torchlib.groups(root)]
        self.recorder.write(
            "model",
            root=name,
            cls=class_name(root),
            parameters=entries,
            buffers=buffers,
            groups=groups,
            blocks=repeated_blocks(root),
            starting_point=loaded,
            at_line=self.recorder.here(),
        )

    def _number(self, root: nn.Module) -> int:
        """Models are counted in the order in which they were sharded, whichever is called first."""
        inside = {id(module) for module in root.modules()}
        tops = [reference() for reference in self.tops]
        number = next((k for k, top in enumerate(tops) if id(top) in inside), len(tops))
        taken = {name for name, _ in self.roots}
        while _root_name(number) in taken:
            number += 1
        return number

    def adopt_the_rest(self) -> None:
        """Models that were sharded and have not been called when training begins, such as an average of the weights."""
        for top in [reference() for reference in self.tops]:
            if top is None or any(p.device.type == "meta" for p in top.parameters()):
                continue
            if all(top is not module for _, root in self.roots for module in root.modules()):
                self.adopt(top)

    def _describe(self, root: str, slot: torchlib.Slot, untouched: list[float]) -> dict[str, Any]:
        part = torchlib.local(slot.param)
        return {
            "name": root + slot.name,
            "shape": list(slot.param.shape),
            "dtype": str(slot.param.dtype).removeprefix("torch."),
            "trainable": slot.param.requires_grad,
            "managed": slot.fsdp is not None,
            "local_numel": part.numel(),
            "numel": slot.param.numel(),
            "sketch": untouched,
            "unset": self._unset(part),
            **torchlib.layout(slot.param, self.rank),
        }

    def _unset(self, tensor: torch.Tensor) -> int:
        """Elements that still hold what `to_empty` left, of a tensor that it allocated (0: all were written)."""
        part = torchlib.local(tensor)
        if part.is_floating_point():
            return int(part.isnan().sum()) if self.filled else 0
        return int((part == torch.iinfo(part.dtype).min).sum()) if self.filled and part.dtype in _INTEGERS else 0

    def fill(self, module: nn.Module) -> None:
        """Mark memory that `to_empty` has just allocated, so that what nobody initialises shows."""
        self.recorder.write("to_empty", cls=class_name(module), at_line=self.recorder.here())
        if not self.request["fill"]:
            return
        for tensor in [*module.parameters(), *module.buffers()]:
            part = torchlib.local(tensor)
            self.filled.add(id(tensor))
            if part.is_floating_point():
                part.fill_(float("nan"))
            elif part.dtype in _INTEGERS:
                part.fill_(torch.iinfo(part.dtype).min)

    def on_shard(self, modules: list[nn.Module], options: dict[str, Any]) -> None:
        """`fully_shard` is about to be applied."""
        below = {id(inner) for module in modules for inner in module.modules()}
        self.tops = [top for top in self.tops if id(top()) not in below] + [weakref.ref(module) for module in modules]
        policy = options.get("mp_policy")
        reshard = options.get("reshard_after_forward")
        parameters = [
            {"name": name, "cls": class_name(module), "dtype": str(param.dtype), "sketch": sketch(param)}
            for module in modules
            for name, param in module.named_parameters()
            if not torchlib.layout(param, 0)["sharded"] and param.device.type != "meta"
        ]
        self.recorder.write(
            "shard",
            modules=[class_name(module) for module in modules],
            param_dtype=dtype_of(policy, "param_dtype"),
            reduce_dtype=dtype_of(policy, "reduce_dtype"),
            output_dtype=dtype_of(policy, "output_dtype"),
            reshard_after_forward=reshard if isinstance(reshard, bool | int) else None,
            unread=_unread(options),
            parameters=parameters,
            at_line=self.recorder.here(),
        )

    def on_sync_flag(self, value: bool) -> None:
        """`set_requires_gradient_sync` was called; the first calls are recorded."""
        self.sync_calls += 1
        if self.sync_calls <= 32:
            self.recorder.write("sync", value=value, step=self.step_number(), at_line=self.recorder.here())

    def on_divide_factor(self, factor: float) -> None:
        """`set_gradient_divide_factor` was called."""
        self.recorder.write("divide", factor=float(factor), at_line=self.recorder.here())

    def on_checkpoint(self, operation: str, target: str, keys: list[str]) -> None:
        """A checkpoint function was called by the script: `save`, `load`, `set_state_dict`, ..."""
        if (place := self.recorder.here()) is not None:
            done = self.step_number() - 1
            if operation == "torch.save":
                outputs.about_to_write(target)
            self.recorder.write("checkpoint", op=operation, after_step=done, to=target, keys=keys, at_line=place)

    def all_slots(self) -> list[torchlib.Slot]:
        """Every parameter of every root, under its full name."""
        return [
            torchlib.Slot(name + s.name, s.param, s.fsdp) for name, root in self.roots for s in torchlib.slots(root)
        ]

    # -- micro-batches ------------------------------------------------------------------------------------------------

    def on_criterion(self, reduction: str, valid: int, value: torch.Tensor) -> None:
        """A cross entropy was computed: how many targets counted, and its value if it is one number."""
        if torch.is_grad_enabled() and value.requires_grad:
            number = float(value.detach()) if value.numel() == 1 else None
            self.criteria.append({"reduction": reduction, "valid": valid, "value": number})

    def on_local(self) -> None:
        """The script asked a plain tensor for its shard: the first time is recorded."""
        if not self.local:
            self.local = True
            self.recorder.write("local", at_line=self.recorder.here())

    def on_inexact(self, what: str) -> None:
        """Dropout or autocast is active, which an exact run switches off: the first time is recorded."""
        if what not in self.inexact:
            self.inexact.add(what)
            self.recorder.write("inexact", what=what, at_line=self.recorder.here())

    def on_backward(self, tensors: list[torch.Tensor]) -> None:
        """A backward has just ended: the gradients are where the optimizer will find them."""
        loss = None
        if len(tensors) == 1 and tensors[0].numel() == 1 and not torchlib.layout(tensors[0], 0)["sharded"]:
            loss = float(tensors[0].detach())
        slots = self.all_slots()
        if self.backward_for > self.steps and self.request["stress"]:
            self._stress(slots)
            return
        self.micro += 1
        self.grads = {s.name: sketch(s.param.grad) if s.param.grad is not None else None for s in slots}
        self.recorder.write(
            "micro",
            step=self.backward_for,
            micro=self.micro,
            loss=loss,
            rows=self.rows,
            criteria=self.criteria,
            random=self.random_state,
            at_line=self.recorder.here(),
        )
        self.rows, self.criteria, self.random_state = [], [], None

    def _stress(self, slots: list[torchlib.Slot]) -> None:
        """In the step after the last: make the gradients huge, so that any clipping there is comes into force."""
        present = [s for s in slots if s.param.grad is not None]
        first = self.stress is None
        if first and present:
            for slot in present:
                if slot.param.grad is not None:
                    torchlib.local(slot.param.grad).mul_(STRESS)
        self.stress = {s.name: torchlib.local(s.param.grad).clone() for s in present if s.param.grad is not None}
        self.stressed += 1
        if not present:
            self.stress = None
        if self.stressed > _PATIENCE:
            self._stop()

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def step_number(self) -> int:
        """The step that is being prepared, or made (a closure may run backward in it), from 1."""
        begun = max((count for _, count in self.optimizers.values()), default=0)
        return begun if self.in_step else 1 + begun

    def on_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer was constructed."""
        number = len(self.optimizers)
        self.optimizers[id(optimizer)] = (number, 0)
        self.living.append(weakref.ref(optimizer))
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.recorder.write(
            "optimizer",
            number=number,
            cls=class_name(optimizer),
            tensors=len(params),
            sharded=sum(torchlib.layout(p, 0)["sharded"] for p in params),
            after_forward=bool(self.roots),
            at_line=self.recorder.here(),
        )

    def on_step(self, optimizer: torch.optim.Optimizer, closure: bool) -> None:
        """An optimizer is about to step. Stops the run if it has made all its steps.

        With a closure, what the step finds is known when the closure has ended, and is recorded then.
        """
        number, count = self.optimizers.setdefault(id(optimizer), (len(self.optimizers), 0))
        if count == 0 and self.roots:
            self.adopt_the_rest()
        if count >= self.steps and not closure:
            self._stop()
        self.optimizers[id(optimizer)] = (number, count + 1)
        self.in_step = True
        self.micro = 0
        self.waiting = optimizer
        if not closure:
            self._record_step()

    def on_closed(self) -> None:
        """The closure of the step that is being made has ended: it ran backward, and may have clipped."""
        if self.step_number() > self.steps:
            self._stop()
        self._record_step()

    def _record_step(self) -> None:
        """What the optimizer that steps finds, before it changes anything."""
        optimizer, self.waiting = self.waiting, None
        if optimizer is None:
            return
        number, count = self.optimizers[id(optimizer)]
        held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        slots = self.all_slots()
        mine = [s for s in slots if id(s.param) in held]
        names = {id(s.param): s.name for s in slots}
        strangers = [p for key, p in held.items() if key not in names]
        self.recorder.write(
            "step",
            step=count,
            optimizer=number,
            cls=class_name(optimizer),
            lr=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            held=[s.name for s in mine],
            strangers=[list(p.shape) for p in strangers],
            unsynced=[s.name for s in slots if s.unsynced],
            grads=self.grads,
            grads_at_step={s.name: sketch(s.param.grad) if s.param.grad is not None else None for s in slots},
            state=optimizer_state(optimizer, names),
            weights={s.name: sketch(s.param) for s in slots},
            at_line=self.recorder.here(),
        )
        self.before = {s.name: torchlib.local(s.param).clone() for s in slots}

    def on_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped."""
        self._record_step()
        number, count = self.optimizers[id(optimizer)]
        self.in_step = False
        slots = self.all_slots()
        moved = {s.name: movement(s.param, self.before[s.name]) for s in slots if s.name in self.before}
        weights = {s.name: sketch(s.param) for s in slots}
        self.recorder.write("stepped", step=count, optimizer=number, weights=weights, moved=moved)

    def _stop(self) -> None:
        self.stopped += 1
        if self.stopped == 1:
            if self.stress is not None:
                grads = {s.name: s.param.grad for s in self.all_slots() if s.param.grad is not None}
                ratios = {
                    name: products(before, torchlib.local(grads[name]))
                    for name, before in self.stress.items()
                    if name in grads
                }
                self.recorder.write("stress", factor=STRESS, products=ratios, at_line=self.recorder.here())
            self.recorder.write("end", how="stopped")
            self.recorder.sync()
        raise StopRun


def _root_name(number: int) -> str:
    return "" if number == 0 else f"model{number}."


_PATIENCE = 256  # backwards without a step after the last step: the script skips steps with huge gradients
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
