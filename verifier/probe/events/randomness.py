"""Random numbers that a training step draws itself: noise, masks, stochastic depth.

They depend on the rank and its number of samples.

Draws within the forward of a model are noise, and so are those that copy the shape of a tensor;
what else a loop draws may choose its data.
"""

import functools

import torch

from ...trace.events import Inexact
from ..dispatcher import Call
from ..frames import caller
from ..session import Session

NOISE = (
    "randn",
    "rand",
    "randint",
    "normal",
    "poisson",
    "bernoulli",
    "randn_like",
    "rand_like",
    "randint_like",
)
IN_PLACE = ("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_")
ANYWHERE = (
    "randn_like",
    "rand_like",
    "randint_like",
    "bernoulli",
    "bernoulli_",
)  # the rest within a forward alone
FUNCTIONS = {
    **{f"torch:{name}": name for name in NOISE},
    **{f"torch:Tensor.{name}": name for name in (*IN_PLACE, "bernoulli")},
}
RECURRENT = ("LSTM", "GRU", "RNN")


def is_noise(session: Session, name: str) -> bool:
    """Whether a draw that begins now is part of a training step."""
    started = bool(session.tops) or bool(session.roots)
    progress = session.progress
    inside = progress.depth > 0 or progress.in_backward
    if not started or not torch.is_grad_enabled() or not (inside or name in ANYWHERE):
        return False
    if progress.elsewhere:  # a reader makes its batches while the main thread is in a forward
        return False
    return not caller().f_code.co_filename.endswith("torch/nn/init.py")


def drops(call: Call) -> bool:
    """Whether a recurrent network that is called drops anything between its layers."""
    module = call.args[0]
    return bool(module.training and module.dropout and module.num_layers > 1)


def install(session: Session) -> None:
    """Subscribe to what draws, and to the dropout of recurrent networks, which no function of
    Python makes.
    """
    seen: set[str] = set()

    def inexact(what: str) -> None:
        if what not in seen:
            seen.add(what)
            session.write(Inexact(what=what))

    def drawn(call: Call, name: str) -> None:
        if "noise" not in seen and is_noise(session, name):
            inexact("noise")

    def recurrent(call: Call) -> None:
        if drops(call):
            inexact("dropout")

    for target, name in FUNCTIONS.items():
        session.around(target, before=functools.partial(drawn, name=name))
    for cls in RECURRENT:
        session.around(f"torch.nn:{cls}.forward", before=recurrent)
