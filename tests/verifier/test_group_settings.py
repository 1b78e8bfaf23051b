"""Settings of parameter groups that no step reads: what the probe records, and what the rule makes
of it.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from records import LINE, cases, judge, run, step, stepped
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.probe.unused_group_settings import Unread, foreign, settings_of_torch

RULE = "group-setting-unread"
SCHEDULE = "def later(group):\n    return group['betas']\n"
OTHER = (
    "class Other:\n    def step(self):\n        for group in self.groups:\n           "
    " print(group['betas'])\n"
)


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(2))]


@cases(
    "group, found",
    ({"betas": (0.95, 0.98)}, ["betas"]),
    ({"weight_decay": 0.1, "rho": 0.9}, ["rho"]),  # SGD has a decay
    ({"rho": 0.0}, []),  # says nothing
    ({"betas": (0.9, 0.0), "momentum": 0.9}, []),  # what its own settings say, too
    (
        {"name": "decay", "initial_lr": 0.1, "lr_scale": 0.5, "fused": True},
        [],
    ),  # no numbers that torch's optimizers take
)
def test_what_is_looked_at(group: dict[str, Any], found: list[str]) -> None:
    optimizer = torch.optim.SGD([{"params": weights(), **group}], lr=0.1)
    assert sorted(foreign(optimizer, optimizer.param_groups[0])) == found
    assert {"betas", "eps", "momentum", "weight_decay"} <= settings_of_torch()
    assert "lr" not in settings_of_torch()


class Reads(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("rho", 0.0)


class Defaults(Reads):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group.setdefault("rho", 0.5)


class Unpacks(Reads):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.update(**group)

    def update(self, **settings: Any) -> None:
        assert settings["rho"] == 0.9


class Grows(Reads):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.add_param_group({"params": weights()})


@cases(
    "cls, unread",
    (torch.optim.SGD, {"rho": "0.9"}),
    (Reads, {}),
    (Defaults, {}),
    (Unpacks, {}),
    (Grows, {"rho": "0.9"}),
)
def test_what_a_step_reads(
    cls: type[torch.optim.SGD], unread: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []

    class Turns:
        def of(self, optimizer: torch.optim.Optimizer) -> Any:
            return type("Turn", (), {"number": 0, "begun": 1})

    progress = SimpleNamespace(optimizers=Turns())
    session: Any = SimpleNamespace(progress=progress, write=written.append)
    optimizer = cls([{"params": weights(), "rho": 0.9}], lr=0.1)
    own, watch = optimizer.param_groups[0], Unread(session)
    watch.stepping(optimizer, False)
    watch.stepping(torch.optim.SGD(weights(), lr=0.1), False)
    assert optimizer.param_groups[0] is not own
    optimizer.step()
    watch.stepped(optimizer)
    assert optimizer.param_groups[0] is own and type(own) is dict
    assert [event.unread for event in written] == [unread]
    assert own.get("steps", 0.9) == 0.9


@cases(
    "unread, elsewhere, text, status",
    ({"betas": "(0.95, 0.98)"}, [], "", "fail"),
    ({}, [], "", "pass"),
    (
        {"betas": "(0.95, 0.98)"},
        ["betas"],
        "",
        "pass",
    ),  # another rank's share of the parameters needs it
    ({"betas": "(0.95, 0.98)"}, [], SCHEDULE, "pass"),
    ({"betas": "(0.95, 0.98)"}, [], OTHER, "fail"),
    ({"betas": "(0.95, 0.98)"}, [], OTHER.replace("Other", "Muon"), "fail"),  # of another module
    (
        {"betas": "(0.95, 0.98)"},
        [],
        OTHER.replace("Other", "Muon").replace("def step", "def step(self): ...\n    def __init__"),
        "pass",
    ),
)
def test_the_rule(unread: dict[str, str], elsewhere: list[str], text: str, status: str) -> None:
    built = {
        "kind": "optimizer",
        "number": 0,
        "cls": "optim.Muon",
        "after_forward": False,
        "at_line": LINE,
    }
    record = {
        "kind": "unread_settings",
        "optimizer": 0,
        "cls": "optim.Muon",
        "step": 1,
        "unread": unread,
    }
    ranks = [
        [built, step(1), stepped(1), {**record, "read": ["lr", *read]}] for read in ([], elsewhere)
    ]
    file = "optim.py" if "__init__" in text else "train.py"
    evidence = Evidence(train=run(*ranks), sources=Sources({file: text}, (file,)))
    found = judge(RULE, evidence)
    assert found.status == status
    if status == "fail":
        assert "`betas` = (0.95, 0.98)" in found.evidence and found.location == LINE
    assert judge(RULE, Evidence(train=run([built, step(1), stepped(1)]))).status == "not_applicable"
