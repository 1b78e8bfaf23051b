"""What is measured in one step: numbers of the host, and scalars of devices that are read later."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch

Names = list[str]


@dataclass
class Measured:
    """What one rank measures at one moment: `kind` is begin (before the first step), check, save
    (by all ranks) or file (by this rank alone).

    Scalars of a device are gathered in one tensor and copied without waiting; `wait` is called in
    the guard's own thread.
    """

    kind: str
    step: int
    label: str = ""  # which of several at this step
    time: float = field(default_factory=time.time)
    # of the host: what each law puts there under its own name
    values: dict[str, Any] = field(default_factory=dict)
    # after `wait`: {what: {name: number}}, sketches as int modulo 2**64, others as float
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    # after `wait`: {what: tensor on the CPU}
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)
    _scalars: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)
    _vectors: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    _sent: list[tuple[list[tuple[str, str]], torch.Tensor]] = field(default_factory=list)
    _events: list[Any] = field(default_factory=list)

    def take(self, what: str, name: str, value: torch.Tensor) -> None:
        """Read a scalar of any device, an integer or a number, under a name."""
        self._scalars.append((what, name, value.detach()))

    def take_vector(self, what: str, values: torch.Tensor) -> None:
        """Read a tensor."""
        self._vectors.append((what, values.detach()))

    def holds(self, what: str) -> bool:
        """Whether anything was taken under this name."""
        return any(one[0] == what for one in self._scalars)

    def send(self) -> None:
        """Copy all to the host, without waiting for the device."""
        kinds: dict[tuple[torch.device, bool], list[tuple[str, str, torch.Tensor]]] = {}
        for one in self._scalars:
            kinds.setdefault((one[2].device, one[2].is_floating_point()), []).append(one)
        for (_, floats), group in kinds.items():
            wide = torch.float64 if floats else torch.int64
            row = torch.stack([value.reshape(()).to(wide) for _, _, value in group])
            self._sent.append(([(what, name) for what, name, _ in group], _to_host(row)))
        self.vectors = {what: _to_host(values) for what, values in self._vectors}
        on_device = [value for _, _, value in self._scalars] + [value for _, value in self._vectors]
        if any(value.device.type == "cuda" for value in on_device):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events.append(event)
        self._scalars, self._vectors = [], []

    def wait(self) -> None:
        """Let `numbers` and `vectors` be there."""
        for event in self._events:
            event.synchronize()
        for keys, row in self._sent:
            for (what, name), value in zip(keys, row.tolist(), strict=True):
                number = value & (2**64 - 1) if isinstance(value, int) else value
                self.numbers.setdefault(what, {})[name] = number
        self._sent, self._events = [], []


def _to_host(values: torch.Tensor) -> torch.Tensor:
    if values.device.type != "cuda":
        return values.cpu()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
