"""Noise that no world size changes: in runs that are compared, what a training step draws is the
same for every row of a batch.

The first dim of what is drawn is taken for the batch. The numbers follow the distribution that the
script asks for, along the other dims, and depend only on the line that draws: a recomputed forward
draws them again.
"""

import functools
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..dispatcher import Call
from ..events.randomness import FUNCTIONS, RECURRENT, drops, is_noise
from ..frames import caller
from ..session import Session


def install(session: Session) -> None:
    """Replace draws where the request says that runs are to be compared."""
    if not (session.request.full_precision or session.request.dropless):
        return
    drawing: list[str] = []  # what is drawn here, while it is
    for target, name in FUNCTIONS.items():
        session.around(target, replace=functools.partial(_drawn, session, drawing, name))
    for cls in RECURRENT:
        session.around(f"torch.nn:{cls}.forward", replace=_undropped)


def _drawn(
    session: Session, drawing: list[str], name: str, call: Call, proceed: Callable[[], Any]
) -> Any:
    drawn = proceed()
    if (
        not drawing
        and name in _VALUES
        and isinstance(drawn, Tensor)
        and drawn.numel()
        and is_noise(session, name)
    ):
        frame = caller()
        key = f"{frame.f_code.co_name} {frame.f_lineno} {name} {tuple(drawn.shape[1:])}"
        generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
        drawing.append(name)  # `torch.rand` is one of these functions
        uniform = torch.rand(
            drawn.shape[1:], generator=generator, dtype=torch.float64, device="cpu"
        ).to(drawn.device)
        drawing.clear()
        with torch.no_grad():
            drawn.copy_(_VALUES[name](call, uniform.clamp(1e-9, 1 - 1e-9)))
    return drawn


def _undropped(call: Call, proceed: Callable[[], Any]) -> Any:
    if not drops(call):
        return proceed()
    module, rate = call.args[0], call.args[0].dropout
    module.dropout = 0.0
    try:
        return proceed()
    finally:
        module.dropout = rate


def _normal(uniform: Tensor) -> Tensor:
    drawn: Tensor = torch.erfinv(2 * uniform - 1) * 2**0.5
    return drawn


def _integers(call: Call, uniform: Tensor, position: int) -> Tensor:
    """`randint(high, size)` and `randint(low, high, size)`, after `position` arguments."""
    given = [a for a in call.args[position:] if isinstance(a, int)]
    low = call.kwargs.get("low", given[0] if len(given) > 1 else 0)
    high = call.kwargs.get("high", given[-1] if given else 1)
    drawn: Tensor = (low + uniform * (high - low)).floor()
    return drawn


_VALUES: dict[str, Callable[[Call, Tensor], Any]] = {
    "randn": lambda call, u: _normal(u),
    "randn_like": lambda call, u: _normal(u),
    "rand": lambda call, u: u,
    "rand_like": lambda call, u: u,
    "randint": lambda call, u: _integers(call, u, 0),
    "randint_like": lambda call, u: _integers(call, u, 1),
    "normal": lambda call, u: call.given(0, "mean", 0.0) + call.given(1, "std", 1.0) * _normal(u),
    "normal_": lambda call, u: call.given(1, "mean", 0.0) + call.given(2, "std", 1.0) * _normal(u),
    "log_normal_": (
        lambda call, u: (call.given(1, "mean", 1.0) + call.given(2, "std", 2.0) * _normal(u)).exp()
    ),
    "uniform_": lambda call, u: (
        call.given(1, "from", 0.0) + u * (call.given(2, "to", 1.0) - call.given(1, "from", 0.0))
    ),
    "exponential_": lambda call, u: -(1 - u).log() / call.given(1, "lambd", 1.0),
    "bernoulli": lambda call, u: (u < call.given(1, "p", call.args[0])).to(torch.float64),
    "bernoulli_": lambda call, u: (u < call.given(1, "p", 0.5)).to(torch.float64),
}
