"""The values that the frames of the training loop can reach, with their paths.

They are found by what they are (buffers, modules that no root holds, optimizers, schedulers,
scalers, tensors, numbers), from the variables of the project's frames and modules; nothing is
called and nothing is changed.
"""

import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .compat.tensors import address, local, own_buffers, own_parameters
from .measures import stream, vocabulary
from .session import Session
from .watched import evaluated, variables

_DEPTH = 6
_ITEMS = 256  # of a container that is walked
# A list of so many numbers is taken for a log, which a resume may begin anew.
_HISTORY = 16  # numbers in a list, from which on it is a log
# Larger tensors are data sets, not state of the training, and cost seconds at each step.
_ELEMENTS = 1 << 22  # of a tensor that is sketched
# Attributes that are torch's own, or compared as weights and optimizer state elsewhere.
_HIDDEN = {
    *vars(nn.Module()),
    "param_groups",
    "state",
    "defaults",
    "optimizer",
    "optimizers",
    "_is_initialized",
}
Leaf = tuple[str, str, Any]  # path, holder, value


class Walk:
    """One walk over all that the training loop reaches; every object is met once, under its first
    path.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen: set[int] = {id(slot.param) for slot in session.all_slots()}
        self.weights = [
            (slot.name, local(slot.param))
            for slot in session.all_slots()
            if slot.param.dtype == torch.float32
        ]
        self.memory = {place for slot in session.all_slots() if (place := address(slot.param))}
        self._roots = {id(module) for _, root in session.roots for module in root.modules()}
        self.function = ""

    def leaves(self) -> Iterator[Leaf]:
        """Tensors and numbers with their paths, the models' own first."""
        for name, root in self._session.roots:
            yield from self._module(root, name.rstrip(".") or "model", 0)
        for name, values in self._scopes():
            for key, value in values:
                # A variable `_` is thrown away: the script says so itself (exam r6 w_09_graph_best
                # twin: `main._`).
                if key.strip("_") and not key.startswith("__"):
                    path = type(value).__name__ if key in ("self", "cls") else f"{name}{key}"
                    yield from self._walk(value, path, "local", 0)

    def watched(self) -> Iterator[Leaf]:
        """What the expressions of `--watch` give, in the innermost frame of the project where they
        can be evaluated.
        """
        for expression in self._session.request.watch:
            found = evaluated(expression, self._session)
            found = found.detach() if isinstance(found, torch.Tensor) else found
            self._seen.discard(id(found))
            for path, _, value in self._walk(found, f"watch {expression}", "watch", 0):
                yield path, "watch", value

    def _scopes(self) -> list[tuple[str, list[tuple[str, Any]]]]:
        """(prefix, variables) of the frames of the project and of their modules, outermost
        first.
        """
        found: list[tuple[str, list[tuple[str, Any]]]] = []
        modules: dict[int, Mapping[str, Any]] = {}
        for frame in self._session.frames.own():
            self.function = self.function or frame.f_code.co_name
            modules[id(frame.f_globals)] = frame.f_globals
            if frame.f_locals is not frame.f_globals:
                found.append((f"{frame.f_code.co_name}.", variables(frame)))
        outer = [("", list(names.items())) for names in modules.values()]
        return [*outer, *reversed(found)]

    def _walk(self, value: Any, path: str, holder: str, depth: int) -> Iterator[Leaf]:
        if isinstance(value, bool | int | float):
            yield path, holder, value
            return
        if (
            depth > _DEPTH
            or id(value) in self._seen
            or value is None
            or isinstance(value, str | bytes | type)
        ):
            return
        self._seen.add(id(value))
        if (drawn := stream(value)) is not None:
            yield path, "generator", drawn
        elif isinstance(value, torch.Tensor):
            yield from _tensor(value, path, holder)
        elif isinstance(value, nn.Module):
            yield from self._module(value, path, depth)
        elif isinstance(value, Optimizer):
            yield from self._optimizer(value, path, depth)
        elif isinstance(value, LRScheduler):
            yield from self._object(value, path, "scheduler", depth)
        elif isinstance(value, torch.amp.GradScaler):
            yield from self._object(value, path, "scaler", depth)
        elif isinstance(value, Mapping | list | tuple | deque):
            for key, item in _items(value):
                yield from self._walk(item, f"{path}[{key!r}]", holder, depth + 1)
        elif isinstance(value, torch.utils.data.Dataset | Iterable):
            # positions of data are judged by the samples
            for key, item in list(getattr(value, "__dict__", {}).items()):
                for text, number in vocabulary(item):
                    yield f"{path}.{key}[{text!r}]", "dataset", number
        elif self._is_own(value):
            yield from self._object(value, path, "object", depth)

    def _module(self, module: nn.Module, path: str, depth: int) -> Iterator[Leaf]:
        for name, part in module.named_modules():
            below = f"{path}.{name}" if name else path
            self._seen.add(id(part))
            held: dict[str, Any] = {
                **own_buffers(part),
                **({} if id(part) in self._roots else own_parameters(part)),
            }
            for key, value in held.items():
                if value is not None:
                    yield from self._walk(value, f"{below}.{key}", "module", depth + 1)
            if self._is_own(part):
                yield from self._object(part, below, "module", depth)

    def _optimizer(self, optimizer: Optimizer, path: str, depth: int) -> Iterator[Leaf]:
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params":
                    yield from self._walk(
                        value, f"{path}.param_groups[{number}][{key!r}]", "optimizer", depth + 1
                    )
        if self._is_own(optimizer):
            yield from self._object(optimizer, path, "optimizer", depth)

    def _object(self, value: Any, path: str, holder: str, depth: int) -> Iterator[Leaf]:
        for key, item in list(getattr(value, "__dict__", {}).items()):
            if not (
                key in _HIDDEN
                or key.startswith(("__", "_fsdp", "_is_fsdp"))
                # Private numbers of a scheduler (`_step_count`) differ by how it is built;
                # `last_epoch` and the rates decide.
                or (holder == "scheduler" and key[0] == "_")
            ):
                yield from self._walk(item, f"{path}.{key}", holder, depth + 1)

    def _is_own(self, value: Any) -> bool:
        """Whether an object is of a class of the project."""
        if isinstance(value, types.SimpleNamespace):
            return True
        classes = [
            c
            for c in type(value).__mro__
            if c.__module__ not in ("builtins", "abc", "typing", "torch.nn.modules.module")
        ]
        files = (getattr(sys.modules.get(c.__module__), "__file__", None) for c in classes)
        return any(file is not None and self._session.frames.owns(file) for file in files)


def _tensor(value: torch.Tensor, path: str, holder: str) -> Iterator[Leaf]:
    # A parameter that fully_shard has replaced reports each read; to look at it would count as one
    # (events/replaced.py).
    if getattr(type(value), "replaced", False):
        return
    value = value.values() if value.is_nested else value
    if value.grad_fn is None and 0 < value.numel() <= _ELEMENTS and value.device.type != "meta":
        trained = isinstance(value, nn.Parameter) and value.requires_grad and holder != "module"
        yield path, "parameter" if trained else holder, value


def _items(container: Any) -> list[tuple[str | int, Any]]:
    """What is walked of a container, by key or number."""
    if isinstance(container, Mapping):
        some = list(container.items())[:_ITEMS]
        return [
            (key if isinstance(key, str | int) else number, item)
            for number, (key, item) in enumerate(some)
        ]
    # Long lists of numbers are logs; lists of tensors are walked.
    log = len(container) > _HISTORY and isinstance(container[0], int | float)
    return [] if log or len(container) > _ITEMS else list(enumerate(container))
