"""What the listener of `hooks_wrapping` writes, in one process and without a process group."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from verified_fsdp2.verifier.probe.hooks_wrapping import Listener, _listen_to_session


class Written:
    """A session that keeps what is recorded."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.recorder = self
        self.roots: list[tuple[str, nn.Module]] = []
        self.stand_in = True
        self.in_backward = False
        self.calls: list[nn.Module] = []

    def write(self, kind: str, **fields: Any) -> None:
        self.records.append({"kind": kind, **fields})

    def here(self) -> dict[str, Any]:
        return {"file": "train.py", "line": 1, "function": "main", "code": ""}

    def step_number(self) -> int:
        return 1

    def on_call(self, module: nn.Module, arguments: Any) -> None:
        self.calls.append(module)

    def on_shard(self, *args: Any) -> None: ...

    def adopt(self, *args: Any) -> None: ...

    def on_step(self, *args: Any) -> None: ...


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def listener() -> tuple[Listener, Written]:
    session = Written()
    return Listener(session), session  # type: ignore[arg-type]


def test_a_tie_over_two_calls_is_seen() -> None:
    heard, _ = listener()
    model = Tied()
    heard.wrapped([model.embed], {})
    assert heard.ties == []
    heard.wrapped([model.head], {})
    (tie,) = heard.ties
    assert {name for _, name, _ in tie} == {"weight"}
    assert {ref() for ref, _, _ in tie} == {model.embed, model.head}


def test_a_parameter_in_the_memory_of_another_is_no_tie() -> None:
    heard, _ = listener()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    heard.wrapped([model[0]], {})
    del model[0].weight  # as fully_shard does, which puts a shard in its place
    model[1].weight = nn.Parameter(torch.zeros(4, 4))
    heard.wrapped([model[1]], {})
    assert heard.ties == []


def test_what_it_remembers_forbids_nothing() -> None:
    heard, _ = listener()
    model = nn.Linear(4, 4)
    heard.wrapped([model], {})
    torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(4, 4)))  # raises if there is a weak reference
    assert bool((model.weight == 1).all())


def test_late_parameters_are_named_and_ignored_ones_are_not() -> None:
    heard, session = listener()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    heard.wrapped([model], {"ignored_params": {model[0].bias}})
    model.register_parameter("scale", nn.Parameter(torch.ones(4)))
    heard.adopted(model)
    (late,) = [r for r in session.records if r["kind"] == "late"]
    assert late["names"] == ["scale"]


def test_late_parameters_are_looked_for_below_the_outermost_sharded_module() -> None:
    heard, session = listener()
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    heard.wrapped([base[0]], {})
    heard.wrapped([base], {"ignored_params": set(base.parameters())})
    base[1].adapter = nn.Linear(4, 2)
    outer = nn.ModuleDict({"base": base, "head": nn.Linear(4, 2)})
    heard.adopted(outer)
    (late,) = [r for r in session.records if r["kind"] == "late"]
    assert late["names"] == ["base.1.adapter.weight", "base.1.adapter.bias"]


def test_an_error_of_its_own_does_not_reach_the_script() -> None:
    heard, session = listener()
    heard.wrapped([nn.Linear(2, 2)], {"mesh": "no mesh"})
    assert [r["kind"] for r in session.records] == ["probe_error"]


def test_what_is_recomputed_in_backward_is_not_looked_at() -> None:
    """Selective activation checkpointing raises at an operator that the first forward did not call: to look is to call one."""
    heard, session = listener()
    _listen_to_session(session, heard)  # type: ignore[arg-type]
    model, looked = nn.Linear(4, 4), []

    def arguments() -> list[Any]:
        looked.append(1)
        return []

    session.in_backward = True
    session.on_call(model, arguments)
    assert (session.calls, looked) == ([model], [])
    session.in_backward = False
    session.on_call(model, arguments)
    assert (session.calls, looked) == ([model, model], [1])
