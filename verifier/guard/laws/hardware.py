"""Hardware: a layer that is computed twice from the same inputs gives the same bits.

At a check some linear layers of the step are computed again, forward as in the step and both
products of the backward twice, without touching the model. FSDP gathers weights with all ranks, so
no rank can repeat a whole micro-batch alone, and the user's code may count its calls. All ranks
also compute a product of fixed numbers: a device that always computes it otherwise differs from the
others of its kind.

What it can miss: a fault in other kernels (attention, normalisation, collectives), one that shows
in fewer than one of the repeated products, layers that are compiled. A fault that meets a part p of
the calls of a layer is seen at a repeat of k layers with probability 1 - (1 - p) ** k.
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ...probe.bit_sketch import mixed, sketch
from ..context import Context
from ..journal import Breach
from ..measured import Measured
from . import Law, Posts

LAYERS = 8  # that are repeated at a time, of all in turn
AGAIN = 3  # further repeats of a layer that differed
SIDE = 256  # of the matrices of fixed numbers
_KINDS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {nn.Linear: functional.linear}


class Hardware(Law):
    """Repeats of layers in a step that is checked."""

    name = "hardware-repeats"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._handles: list[Any] = []
        self._found: list[tuple[str, str, int]] = []  # (layer, pass, elements that differed)
        self._next = 0  # which layer is the next one
        self._checks = 0
        self._fixed: torch.Tensor | None = None
        self._noisy: set[str] = set()  # layers whose kernels are not deterministic

    def forward(self, module: nn.Module, given: list[torch.Tensor]) -> None:
        self._remove()
        if not self._due():
            return
        if any(_compiled(part) for part in module.modules()):
            self.context.journal.note("layers are compiled: none is repeated")
            return
        names = {
            id(part): (name, part) for name, part in module.named_modules() if type(part) in _KINDS
        }
        layers = [one for one in names.values() if one[0] not in self._noisy]
        for name, layer in itertools.islice(itertools.cycle(layers), self._next, None):
            if len(self._handles) == min(LAYERS, len(layers)):
                break
            # Before FSDP's own hook, which frees the gathered weights.
            hook = layer.register_forward_hook(self._repeat(name), prepend=True)
            self._handles.append(hook)
        self._next += len(self._handles)
        self._next %= max(1, len(layers))

    def _due(self) -> bool:
        """Whether the coming step repeats layers: a checked one, from the second check on."""
        every = self.context.settings.repeat
        due = self.context.due and self.context.made > 0
        return bool(every) and due and self._checks % every == 0

    def stepped(self, lead: bool) -> None:
        if lead:
            self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _repeat(self, name: str) -> Callable[..., None]:
        done: list[bool] = []

        def hook(layer: nn.Module, given: tuple[Any, ...], result: Any) -> None:
            tensors = (*given, result, layer.weight, layer.bias)
            if done or any(isinstance(one, DTensor) for one in tensors):
                return
            done.append(True)
            try:
                self._compare(name, layer, given[0].detach(), result.detach())
            except Exception as error:
                self.context.journal.error("hardware", error)

        return hook

    def _compare(self, name: str, layer: Any, given: torch.Tensor, result: torch.Tensor) -> None:
        weight = layer.weight.detach()
        bias = None if layer.bias is None else layer.bias.detach()
        gradient = result.reshape(-1, result.shape[-1]).to(weight.dtype)
        rows = given.reshape(-1, given.shape[-1]).to(weight.dtype)
        passes: dict[str, Callable[[], torch.Tensor]] = {
            "forward": lambda: _KINDS[type(layer)](given, weight, bias),
            # the shapes of its gradients, from numbers of the step
            "gradient of the input": lambda: gradient @ weight,
            "gradient of the weight": lambda: gradient.T @ rows,
        }
        with torch.no_grad():
            for kind, compute in passes.items():
                first = result if kind == "forward" else compute()
                if not (differ := _unlike(first, compute())):
                    continue
                more = [_unlike(first, compute()) for _ in range(AGAIN)]
                # One result is the odd one, the first or the second; where all differ from the
                # first by other amounts the kernel is not deterministic.
                if more in ([0] * AGAIN, [differ] * AGAIN):
                    self._found.append((name, kind, differ))
                else:
                    self._noisy.add(name)

    def measure(self, measured: Measured) -> None:
        device = next((s.param.device for s in self.context.scene.slots()), None)
        if self.context.settings.repeat and device is not None and device.type != "meta":
            self._product(measured, device)
        self._checks += 1
        measured.values["repeats"], self._found = self._found, []

    def _product(self, measured: Measured, device: torch.device) -> None:
        """A product of fixed numbers, on the device of the model."""
        if self._fixed is None or self._fixed.device != device:
            index = torch.arange(SIDE * SIDE, dtype=torch.int64, device=device)
            self._fixed = (mixed(index) >> 40).to(torch.float32).reshape(SIDE, SIDE) / (1 << 23)
        bits = sketch(functional.linear(self._fixed, self._fixed))
        if bits is not None:
            measured.take("fixed", "", bits)
        measured.values["device"] = f"{_kind(device)}, torch {torch.__version__}"

    def local(self, measured: Measured) -> Iterator[Breach]:
        for name in self._noisy:
            self.context.journal.note(f"{name} is not deterministic here: it is not repeated")
        for name, kind, count in measured.values.get("repeats", ()):
            yield self.breach(
                measured.step,
                f"the {kind} of {name}, computed {AGAIN + 2} times from the same numbers, came out"
                f" otherwise once, in {count} elements",
                ranks=[self.context.rank],
                names=[name],
                edit=f"take the device out of use and test it: {_device()}",
                command="",
                key=f"repeat {name}",
            )

    def post(self, measured: Measured) -> dict[str, Any]:
        fixed = measured.numbers.get("fixed", {})
        if not fixed:
            return {}
        return {"fixed": fixed[""], "kind": measured.values["device"], "device": _device()}

    def judge(self, measured: Measured, posts: Posts) -> Iterable[Breach]:
        kinds: dict[str, dict[int, int]] = defaultdict(dict)
        for rank, post in posts.items():
            if post:
                kinds[post["kind"]][rank] = post["fixed"]
        for kind, values in kinds.items():
            usual = max(values.values(), key=[*values.values()].count)
            odd = sorted(rank for rank, value in values.items() if value != usual)
            if odd:
                where = ", ".join(posts[rank]["device"] for rank in odd[:4])
                yield self.breach(
                    measured.step,
                    f"ranks {odd[:8]} compute a product of fixed numbers otherwise than the other"
                    f" devices of the kind {kind}: {where}",
                    ranks=odd,
                    edit="take the device out of use and test it",
                    command="",
                    key=f"fixed {odd}",
                )


def _unlike(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many elements differ, where NaN is like NaN. It waits for the device."""
    return int(((one != other) & ~((one != one) & (other != other))).sum())


def _kind(device: torch.device) -> str:
    """Devices of one kind compute the same bits: of CPUs those with the same instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _device() -> str:
    if not torch.cuda.is_available():
        return f"{os.uname().nodename}, CPU"
    device = torch.cuda.current_device()
    return f"{os.uname().nodename}, cuda:{device} ({torch.cuda.get_device_properties(device).name})"
