"""CUDA's random numbers: a generator for each device, beside that of the CPU.

Its state is a seed and an offset, 16 bytes as on a GPU, which DTensor moves to give each shard
numbers of its own. What is drawn depends on both alone. The numbers are others than a GPU's.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...session import Session
from ._answers import answer
from .marks import CPU, CUDA, device_from

_DEFAULT_SEED = 67280421310721  # of CUDA's generators before they are seeded
_RANGE = 1 << 63
_REAL = torch.Generator


class _State:
    """The default generator of a device."""

    def __init__(self) -> None:
        self.seed, self.offset = _DEFAULT_SEED, 0

    def as_tensor(self) -> Tensor:
        values = torch.tensor(
            [_signed(self.seed), _signed(self.offset)], dtype=torch.int64, device="cpu"
        )
        return values.view(torch.uint8)

    def load(self, state: Tensor) -> None:
        seed, offset = state.cpu().contiguous().view(torch.int64).tolist()
        self.seed, self.offset = seed % (2 * _RANGE), offset % (2 * _RANGE)


def _signed(value: int) -> int:
    return (value + _RANGE) % (2 * _RANGE) - _RANGE


_states: dict[int, _State] = {}


def _state(device: Any = "cuda") -> _State:
    found = device_from(device)
    index = CUDA.current if found is None or found.index is None else found.index
    return _states.setdefault(index, _State())


def drawn(device: torch.device, func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation whose random numbers come from the generator of `device`."""
    state, generator = _state(device), torch.default_generator
    before = generator.get_state()
    generator.manual_seed(
        (state.seed * 0x9E3779B97F4A7C15 + state.offset * 0xBF58476D1CE4E5B9 + 1) % _RANGE
    )
    try:
        result = func(*args, **kwargs)
    finally:
        generator.set_state(before)
    first = result[0] if isinstance(result, tuple) else result
    state.offset += 4 * ((first.numel() if isinstance(first, Tensor) else 1) // 4 + 1)
    return result


class _DefaultGenerator:
    """One of `torch.cuda.default_generators`."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    def get_state(self) -> Tensor:
        """A seed and an offset, 16 bytes."""
        return _state(self.device).as_tensor()

    def set_state(self, state: Tensor) -> "_DefaultGenerator":
        """Draw on from there."""
        _state(self.device).load(state)
        return self

    def manual_seed(self, seed: int) -> "_DefaultGenerator":
        """Draw anew."""
        _states[self.device.index] = _State()
        _states[self.device.index].seed = int(seed) % (2 * _RANGE)
        return self

    def initial_seed(self) -> int:
        """What it was seeded with."""
        return _state(self.device).seed


class _OfAnyDevice(type(_REAL)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _REAL)


class Generator(_REAL, metaclass=_OfAnyDevice):
    """`torch.Generator(device="cuda")`: one of the CPU that names CUDA as its device."""

    named: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        """A generator of the device."""
        found = device_from(device) or CPU
        if found.type != "cuda":
            return _REAL(found)
        made = _REAL.__new__(cls)
        made.named = found
        return made

    def __init__(self, device: Any = "cpu") -> None:
        """Nothing is left to do."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that was asked for."""
        return self.named


def _seed(seed: int) -> None:
    _state().__init__()  # type: ignore[misc]
    _state().seed = int(seed) % (2 * _RANGE)


def _seed_all(seed: int) -> None:
    for index in range(CUDA.count):
        _states[index] = _State()
        _states[index].seed = int(seed) % (2 * _RANGE)


def _states_of_all() -> list[Tensor]:
    return [_state(index).as_tensor() for index in range(CUDA.count)]


def _load_all(states: Iterable[Tensor]) -> None:
    for index, state in enumerate(states):
        _state(index).load(state)


def _fresh() -> int:
    return int.from_bytes(os.urandom(7), "little")


def install(session: Session) -> None:
    """Answer the random functions of `torch.cuda`; `torch.manual_seed` calls them."""
    answer(
        session,
        "torch.cuda.random",
        {
            "get_rng_state": lambda device="cuda": _state(device).as_tensor(),
            "set_rng_state": lambda new_state, device="cuda": _state(device).load(new_state),
            "get_rng_state_all": _states_of_all,
            "set_rng_state_all": _load_all,
            "manual_seed": _seed,
            "manual_seed_all": _seed_all,
            "initial_seed": lambda: _state().seed,
            "seed": lambda: _seed(_fresh()),
            "seed_all": lambda: _seed_all(_fresh()),
        },
    )
    torch.Generator = Generator  # type: ignore[misc]
    torch.cuda.default_generators = tuple(map(_DefaultGenerator, range(CUDA.count)))  # type: ignore[assignment]
