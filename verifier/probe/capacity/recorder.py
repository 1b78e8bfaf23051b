"""What a capacity run records while it runs; `replay.py` makes the record of it.

Memory is a list of changes: which storage grew or shrank on CUDA, in the order of time. What a
storage is for is often known only later (a gradient is one when the optimizer reads it), so kinds
are kept beside the list, and the last one that was given counts.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...trace.events import Place
from ..compat.operators import node_of_backward, node_of_forward
from ..compat.tensors import NO_STORAGE, local, tensors
from ..frames import Frames

NUMBER = "fsdp2_number"
INITIALISATION, FIRST, LATER, SAVE = "initialisation", "first step", "later steps", "save"

# What code allocates, until something more exact is known.
GATHERED, REDUCTION = "gathered parameters", "reduction buffers"
SHARDED, WHOLE = "sharded parameters", "parameters that are not sharded"
GRADIENTS, UNSHARDED_GRADIENTS = "gradients", "unsharded gradients"
OPTIMIZER, ACTIVATIONS, LOGITS = "optimizer state", "activations", "logits and loss"
BUFFERS, INPUTS, TEMPORARY = "buffers", "inputs", "temporary"
FORWARD, RECOMPUTED = "forward", "recomputed"  # activations if they outlive it
PURPOSES = {GATHERED: "parameters", REDUCTION: "gradients"}
_FEW = 512  # rows of an embedding that make no vocabulary


@dataclass
class Sent:
    """Equal collectives of one step, as in the record."""

    collective: str
    group: str
    group_size: int
    bytes: int
    dtype: str
    step: int
    module: str
    phase: str
    purpose: str  # parameters, gradients: of FSDP
    stride: int  # between the ranks of the group
    count: int = 0
    in_first: int = 0


@dataclass
class Flops:
    """The floating-point operations of a module in one step; `recompute` is a part of `backward`,
    `masked` of both.
    """

    forward: int = 0
    backward: int = 0
    recompute: int = 0
    masked: int = 0
    dtype: str = ""


@dataclass
class Recorder:
    """The memory and the work of this process."""

    frames: Frames
    stream: Callable[[], int]  # the number of the current one
    now: ClassVar[Recorder]  # that of this process
    step: int = 0  # 0: before the first forward
    whole: int = 0  # steps whose weights were updated
    forwards: int = 0  # of the roots, in this step
    depth: int = 0  # of module calls
    in_backward: bool = False
    in_optimizer: bool = False
    forward_ended: bool = False  # since the last backward: what follows is the loss
    backward_ended: bool = False  # since the last optimizer step: what follows is clipping
    changes: list[tuple[int, int]] = field(default_factory=list)  # (number of a storage, bytes)
    kinds: list[str] = field(default_factory=list)  # by number
    sizes: list[int] = field(default_factory=list)  # of what is allocated now, by number
    streams: list[int] = field(default_factory=list)  # the current one, by position in `changes`
    # (position in `changes`, name)
    phases: list[tuple[int, str]] = field(default_factory=lambda: [(0, INITIALISATION)])
    backwards: list[int] = field(default_factory=list)  # positions where one begins
    # positions where a call within a backward ends
    recomputed: list[int] = field(default_factory=list)
    # position of a new peak: line, module
    lines: dict[int, tuple[Place | None, str]] = field(default_factory=dict)
    reads: dict[tuple[Any, ...], list[Any]] = field(default_factory=dict)
    sent: dict[tuple[Any, ...], Sent] = field(default_factory=dict)
    # bytes that operators without FLOPs read and write, by step
    moved: Counter[int] = field(default_factory=Counter)
    flops: dict[int, dict[str, Flops]] = field(default_factory=dict)  # by step and module
    mesh: dict[str, int] = field(default_factory=dict)
    mesh_ranks: int = 0
    mesh_line: Place | None = None
    names: dict[int, str] = field(default_factory=dict)  # of modules, by id
    stack: list[str] = field(default_factory=list)  # names of the modules that are running
    # what FSDP is doing, for which module
    purpose: list[tuple[str, str]] = field(default_factory=list)
    vocabularies: set[int] = field(default_factory=set)
    parameters: int = 0  # of the largest module that the script calls
    total: int = 0
    highest: int = 0  # in this phase
    most: int = 0  # since the script last reset it
    optimized: bool = False  # an optimizer of torch has stepped
    updated: bool = False  # the script has changed weights itself, outside of forwards
    # module by the sequence number of its autograd node
    nodes: dict[int, str] = field(default_factory=dict)
    # integers that the roots are given, by step
    tokens: Counter[int] = field(default_factory=Counter)

    def placed(self, tensor: Tensor, storage: Any) -> None:
        """A storage lies on CUDA now."""
        if getattr(storage, NUMBER, None) is not None:
            return
        number = len(self.kinds)
        setattr(storage, NUMBER, number)
        self.kinds.append(self._kind(tensor))
        self.sizes.append(0)
        weakref.finalize(storage, self.resized, number, 0).atexit = False
        self.resized(number, storage.nbytes())

    def resized(self, number: int, size: int) -> None:
        """A storage has another size; 0: it is free."""
        change = size - self.sizes[number]
        if change == 0:
            return
        self.sizes[number] = size
        self.changes.append((number, change))
        self.streams.append(self.stream())
        self.total += change
        self.most = max(self.most, self.total)
        if self.total > self.highest:
            self.highest = self.total
            self.lines[len(self.changes) - 1] = (self.frames.here(), self.module())

    def phase(self, name: str) -> None:
        """Another phase begins."""
        if name != self.phases[-1][1]:
            self.phases.append((len(self.changes), name))
            self.highest = self.total
            self.lines[len(self.changes)] = (self.frames.here(), self.module())

    def module(self) -> str:
        """The module that is running, or for which FSDP works."""
        return self.purpose[-1][1] if self.purpose else self.stack[-1] if self.stack else ""

    def label(self, values: Any, kind: str, unless: Sequence[str] = ()) -> None:
        """What the storages of tensors are for."""
        for tensor in tensors(values):
            try:
                number = getattr(local(tensor).untyped_storage(), NUMBER, None)
            except NO_STORAGE:
                continue
            if number is not None and self.kinds[number] not in unless:
                self.kinds[number] = kind

    def _kind(self, tensor: Tensor) -> str:
        if self.purpose:
            return self.purpose[-1][0]
        if tensor.dim() > 1 and tensor.shape[-1] in self.vocabularies and not self.in_optimizer:
            return LOGITS
        if self.in_optimizer:
            return TEMPORARY
        if self.in_backward:
            return RECOMPUTED if self.depth else TEMPORARY
        if self.depth:
            return FORWARD
        if self.step == 0 or self.backward_ended:
            return TEMPORARY
        return LOGITS if self.forward_ended else INPUTS

    def changed(self, values: Any) -> None:
        """Tensors were changed in place."""
        if self.depth or self.in_optimizer or self.optimized or self.updated:
            return
        numbers = (getattr(one.untyped_storage(), NUMBER, None) for one in tensors(values))
        self.updated = any(
            number is not None and self.kinds[number] in (SHARDED, WHOLE) for number in numbers
        )

    def where(self) -> str:
        """The part of a step that is running."""
        if self.in_backward:
            return "backward"
        return "optimizer" if self.in_optimizer else "forward" if self.depth else "other"

    def collective(self, kind: str, group: Any, size: int, dtype: str) -> None:
        """A collective over a process group, of a tensor of `size` bytes."""
        name = str(getattr(group, "group_desc", "") or "").removeprefix("mesh_")
        name = "world" if name in ("", "undefined", "default_pg") else name
        ranks = dist.get_process_group_ranks(group)
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        purpose = PURPOSES.get(self.purpose[-1][0], "") if self.purpose else ""
        key = (
            kind,
            name,
            len(ranks),
            size,
            dtype,
            self.step,
            self.module(),
            self.where(),
            purpose,
            stride,
        )
        if key not in self.sent:
            self.sent[key] = Sent(*key)
        self.sent[key].count += 1
        self.sent[key].in_first += self.forwards <= 1

    def read(self, what: str, synchronizes: bool) -> None:
        """The script reads a value of a tensor."""
        place = self.frames.here()
        if place is not None:
            key = (what, place.file, place.line, self.step > 0)
            self.reads.setdefault(key, [0, place, synchronizes])[0] += 1

    def moves(self, amount: int) -> None:
        """An operator without FLOPs reads and writes that many bytes; those of the optimizer, and
        beside compute, are left out.
        """
        if not self.in_optimizer and not self.stream():
            self.moved[self.step] += amount

    def computed(self, amount: int, dtype: torch.dtype, masked: bool) -> None:
        """Floating-point operations of one operator; a causal mask hides half of those of
        attention.
        """
        if self.in_backward and not self.depth:
            number = node_of_backward()
            name = self.nodes.get(number, "") if number is not None else ""
        else:
            name = self.module()
            self.nodes[node_of_forward()] = name
        found = self.flops.setdefault(self.step, {}).setdefault(name, Flops())
        found.dtype = str(dtype).removeprefix("torch.")
        found.masked += amount // 2 if masked else 0
        if self.in_backward:
            found.backward += amount
            found.recompute += amount if self.depth else 0
        else:
            found.forward += amount

    def adopt(self, root: torch.nn.Module) -> None:
        """Names and parameters of a module that the script calls."""
        for name, module in root.named_modules():
            self.names.setdefault(id(module), plain(name))
            if isinstance(module, torch.nn.Embedding) and module.num_embeddings >= _FEW:
                self.vocabularies.add(module.num_embeddings)
        self.parameters = max(self.parameters, sum(one.numel() for one in root.parameters()))
        for param in root.parameters():
            self.label(
                param, SHARDED if hasattr(param, "device_mesh") else WHOLE, unless=(GATHERED,)
            )
        self.label(list(root.buffers()), BUFFERS)


def plain(name: str) -> str:
    """The name of a module without those of wrappers."""
    return ".".join(
        part
        for part in name.split(".")
        if part not in ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
    )
