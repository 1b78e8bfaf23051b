"""What the topic `wrapping` records, in one process and without a process group."""

from typing import Any

import torch
from torch import nn

from records import Recorder
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.probe.events.wrapping import Wrapping, install
from verified_fsdp2.verifier.probe.session import Session
from verified_fsdp2.verifier.trace.events import Late, ProbeError

REQUEST = Request("", "t.py", "", 2, mode="ddp")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight


def session() -> tuple[Session, Recorder]:
    written = Recorder()
    return Session(REQUEST, 0, written, written), written


def wrapping() -> tuple[Wrapping, Recorder]:
    own, written = session()
    return Wrapping(own), written


def test_a_tie_over_two_calls_is_seen() -> None:
    watch, _ = wrapping()
    model = Tied()
    watch.wrapped([model.embed], {})
    assert watch.ties == []
    watch.wrapped([model.head], {})
    (tie,) = watch.ties
    assert {name for _, name, _ in tie} == {"weight"}
    assert {ref() for ref, _, _ in tie} == {model.embed, model.head}


def test_a_parameter_in_the_memory_of_another_is_no_tie() -> None:
    watch, _ = wrapping()
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    watch.wrapped([model[0]], {})
    del model[0].weight  # as fully_shard does, which puts a shard in its place
    model[1].weight = nn.Parameter(torch.zeros(4, 4))
    watch.wrapped([model[1]], {})
    assert watch.ties == []


def test_what_it_remembers_forbids_nothing() -> None:
    watch, _ = wrapping()
    model = nn.Linear(4, 4)
    watch.wrapped([model], {})
    torch.utils.swap_tensors(
        model.weight, nn.Parameter(torch.ones(4, 4))
    )  # raises if there is a weak reference
    assert bool((model.weight == 1).all())


def test_late_parameters_are_named_and_ignored_ones_are_not() -> None:
    watch, written = wrapping()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    watch.wrapped([model], {"ignored_params": {model[0].bias}})
    model.register_parameter("scale", nn.Parameter(torch.ones(4)))
    watch.adopted(model, "")
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    watch.wrapped([base[0]], {})
    watch.wrapped([base], {"ignored_params": set(base.parameters())})
    base[1].adapter = nn.Linear(4, 2)  # they are looked for below the outermost sharded module
    watch.adopted(nn.ModuleDict({"base": base, "head": nn.Linear(4, 2)}), "")
    late = [event.names for event in written.events if isinstance(event, Late)]
    assert late == [["scale"], ["base.1.adapter.weight", "base.1.adapter.bias"]]


def test_an_error_of_its_own_does_not_reach_the_script() -> None:
    own, written = session()
    install(own)
    own.publish("shard", [nn.Linear(2, 2)], {"mesh": "no mesh"})
    (error,) = written.events
    assert isinstance(error, ProbeError) and error.symbol.endswith("Wrapping.wrapped")


def test_what_is_recomputed_in_backward_is_not_looked_at() -> None:
    """Selective activation checkpointing raises at an operator that the first forward did not call:
    to look is to call one.
    """
    own, _ = session()
    install(own)
    looked = []

    def given() -> list[Any]:
        looked.append(1)
        return []

    own.progress.in_backward = True
    own.publish("call", nn.Linear(4, 4), given)
    assert looked == []
    own.progress.in_backward = False
    own.publish("call", nn.Linear(4, 4), given)
    assert looked == [1]
