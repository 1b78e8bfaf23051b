"""What a thread of the script does beside the training is no part of a step."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from verified_fsdp2.verifier.probe.dispatcher import Call
from verified_fsdp2.verifier.probe.events.calls import Calls
from verified_fsdp2.verifier.probe.events.randomness import is_noise
from verified_fsdp2.verifier.probe.optimizer_ids import Turns
from verified_fsdp2.verifier.probe.session import StepProgress


def beside(function: Any, *given: Any) -> Any:
    """What a function returns in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *given).result()


def session(progress: StepProgress) -> Any:
    root = nn.Linear(2, 2)
    return SimpleNamespace(
        progress=progress, roots=[("", root)], tops=[root], one=lambda kind: None, batch=None
    )


def test_what_a_reader_draws_during_a_forward_is_no_noise() -> None:
    progress = StepProgress(Turns(), depth=1)
    for name in ("randint", "randn_like"):
        assert is_noise(session(progress), name)
        assert not beside(is_noise, session(progress), name)
    # a script that trains in a thread of its own
    progress.thread = beside(threading.get_ident)
    assert not is_noise(session(progress), "randint")


def test_a_module_that_a_reader_calls_is_not_within_another() -> None:
    progress = StepProgress(Turns())
    calls = Calls(session(progress))
    call = Call((nn.Linear(2, 2), torch.zeros(1, 2)), {})
    assert beside(calls.before, call) is None
    assert progress.depth == 0


def test_autograd_computes_in_threads_of_its_own() -> None:
    progress, seen = StepProgress(Turns()), []
    # as from a thread that Python has not started
    alien = threading._DummyThread if hasattr(threading, "_DummyThread") else None
    assert alien is not None and alien.__name__ == "_DummyThread"

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            seen.append(progress.elsewhere)
            return grads[0]

    Watched.apply(torch.ones(2, requires_grad=True)).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [False]
