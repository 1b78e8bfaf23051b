"""The state of torch's default generator after each step, and where the script sets it: whether its
numbers come again.
"""

from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...trace.events import Place, RandomStream
from ..dispatcher import Call
from ..frames import caller
from ..session import Session
from .recompute import hashed

_SETTERS = (
    "torch:manual_seed",
    "torch.random:manual_seed",
    "torch:set_rng_state",
    "torch.random:set_rng_state",
)
_STEPS = 400


def install(session: Session) -> None:
    """Subscribe to the setters, and to the steps of the first optimizer."""
    line: Place | None = None
    evaluating = False
    first, steps = 0, 0

    def setting(call: Call) -> None:
        """`fork_rng` and activation checkpointing, which put the state back, are torch's own."""
        nonlocal line, evaluating
        # fork_rng and activation checkpointing put the state back themselves: torch's own, not the
        # script's seed.
        if "torch" not in caller().f_globals.get("__name__", "").split(".")[:1]:
            line, evaluating = session.here(), not torch.is_grad_enabled()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        nonlocal first, steps, line, evaluating
        first = first or id(optimizer)
        if id(optimizer) == first and steps < _STEPS:
            steps += 1
            state = hashed(torch.get_rng_state())
            session.write(
                RandomStream(step=steps, state=state, evaluating=evaluating, at_line=line)
            )
            line, evaluating = None, False

    for target in _SETTERS:
        session.around(target, before=setting)
    register_optimizer_step_post_hook(session.guarded(after))
