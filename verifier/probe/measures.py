"""Small measurements of modules, tensors, optimizers and vocabularies, as values that go into a
record.
"""

import hashlib
import random
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice

import torch
from torch import nn

from ..trace.events import Block
from .compat.cuda import TENSOR_DEVICE, without_modes
from .compat.tensors import elements, local, plain, version
from .tensor_fingerprint import sketch


def class_name(value: object) -> str:
    """`module.Class` of an object."""
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}"


def short_name(value: object) -> str:
    """The class of a module without the prefix that FSDP gives it: `Linear`."""
    return type(value).__name__.removeprefix("FSDP")


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def products(before: torch.Tensor, after: torch.Tensor) -> list[float]:
    """[before.before, before.after, after.after] in float64."""
    b, a = before.to(torch.float64).flatten(), after.to(torch.float64).flatten()
    return [float(b @ b), float(b @ a), float(a @ a)]


def movement(param: torch.Tensor, before: torch.Tensor) -> list[float]:
    """[change.change, change.gradient, elements that changed] of this rank's part; change.gradient
    < 0 reduces the loss.
    """
    change = (plain(local(param)) - before).to(torch.float64).flatten()
    along = (
        0.0 if param.grad is None else float(change @ local(param.grad).to(torch.float64).flatten())
    )
    return [float(change @ change), along, float(change.count_nonzero())]


def writes(tensors: Iterable[torch.Tensor]) -> int:
    """How often the parameters among tensors have been written in place, as autograd counts it on
    this rank's parts.
    """
    return sum(
        version(local(tensor.detach())) for tensor in tensors if isinstance(tensor, nn.Parameter)
    )


_WORDS = 64  # of a vocabulary
_DIGESTED = 1 << 16
_SAMPLED = 1 << 13  # elements of a large tensor that are looked at to see a change
_WHOLE = 1 << 16  # bytes up to which all are


def shard_digest(part: torch.Tensor) -> str | None:
    """A digest of the bytes of a shard (of its first rows, if it is large); None if it is too small
    or uniform to compare.
    """
    rows = plain(part.detach())
    if rows.device.type == "meta" or rows.layout != torch.strided or rows.numel() == 0:
        return None
    rows = (
        rows[: max(2, _DIGESTED * rows.shape[0] // rows.numel())]
        if rows.numel() > _DIGESTED
        else rows
    )
    # Constants (biases, norms) and tiny shards are equal on all ranks by right.
    if rows.numel() < 8 or rows.dim() == 0 or rows.shape[0] < 2 or bool((rows == rows[:1]).all()):
        return None
    return hashlib.sha256(rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[
        :16
    ]


def element_hash(tensor: torch.Tensor) -> int:
    """A hash of this rank's part, for this process alone: of its bytes, or of 2 * _SAMPLED elements
    spread over a large one.
    """
    part = plain(local(tensor)).detach()
    usual = (
        type(part) is torch.Tensor
        and part.layout == torch.strided
        and not (part.is_complex() or part.is_neg())
    )
    if usual and part.numel() * part.element_size() <= _WHOLE:
        return hash(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    some = elements(part)
    some = (torch.view_as_real(some) if some.is_complex() else some).reshape(-1)
    some = some[:: max(1, some.numel() // _SAMPLED)].to(torch.float64)
    return hash(tuple((_sines(some.numel(), TENSOR_DEVICE(some)) @ some).tolist()))


@lru_cache(maxsize=64)
def _sines(length: int, device: torch.device) -> torch.Tensor:
    # Multiples of integers add up to 0 for [-1, 1, 1, -1], as biases of experts move: a change went
    # unseen.
    """Ones, and sines of integers: no sum of their multiples is 0, as it is of 1, 2, 3 and 4 for
    [-1, 1, 1, -1] (biases of experts).
    """
    with without_modes():
        ones = torch.ones(length, dtype=torch.float64, device=device)
        return torch.stack(
            [ones, torch.arange(1, length + 1, dtype=torch.float64, device=device).sin()]
        )


def random_state() -> str:
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    return digest.hexdigest()[:16]


def first_sketch(values: object) -> list[float] | None:
    """The sketch of the first tensor in what a module was given or has made; None without one."""
    if isinstance(values, torch.Tensor):
        return sketch(values.detach())
    inside = (
        values.values()
        if isinstance(values, dict)
        else values
        if isinstance(values, list | tuple)
        else ()
    )
    return next((found for value in inside if (found := first_sketch(value)) is not None), None)


def stream(value: object) -> int | None:
    """48 bits for the state of a random generator of torch, Python or NumPy; None for what is
    none.
    """
    if isinstance(value, torch.Generator):
        state = bytes(value.get_state().tolist())
    elif isinstance(value, random.Random) and not isinstance(
        value, random.SystemRandom
    ):  # which has none
        state = repr(value.getstate()).encode()
    elif type(value).__module__.startswith("numpy.random") and hasattr(value, "bit_generator"):
        state = repr(value.bit_generator.state).encode()
    else:
        return None
    return int(hashlib.sha256(state).hexdigest()[:12], 16)


def optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> dict[str, dict[str, list[float] | float]]:
    """{parameter name: {state key: sketch, or the number itself}} before the step."""
    out: dict[str, dict[str, list[float] | float]] = {}
    for param, state in optimizer.state.items():
        if (name := names.get(id(param))) is not None and state:
            kept = {
                key: value
                for key, value in state.items()
                if isinstance(value, torch.Tensor | int | float)
            }
            out[name] = {
                k: sketch(v) if isinstance(v, torch.Tensor) and v.dim() else float(v)
                for k, v in kept.items()
            }
    return out


def repeated_blocks(root: nn.Module) -> list[Block]:
    """Sibling modules of one class that each hold further modules with parameters: what a wrapping
    plan would name.
    """
    out = []
    for name, parent in root.named_modules():
        kinds: dict[str, list[nn.Module]] = {}
        for child in parent.children():
            if any(True for _ in child.children()) and any(True for _ in child.parameters()):
                kinds.setdefault(class_name(child).replace("FSDP", ""), []).append(child)
        for cls, members in kinds.items():
            if len(members) >= 2:
                numel = sum(p.numel() for m in members for p in m.parameters())
                out.append(Block(parent=name, cls=cls, count=len(members), numel=numel))
    return out


def vocabulary(value: object) -> list[tuple[str, int]]:
    """The first entries of a dict from texts to consecutive numbers; [] of anything else."""
    items = list(islice(value.items(), _WORDS)) if isinstance(value, dict) else []
    if len(items) < 2 or not all(
        isinstance(key, str) and type(number) is int for key, number in items
    ):
        return []
    numbers = sorted(number for _, number in items)
    return items if numbers == [*range(numbers[0], numbers[0] + len(items))] else []
