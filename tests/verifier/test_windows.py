"""Steps behind the first ones: which are compared, from what state, and how findings name them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_formats import valid
from test_horizon import FILE, SOURCES
from test_proved import compared
from torch import nn

from records import cases, micro, model, run, step, stepped
from verified_fsdp2.verifier.analysis.late_changes import windows
from verified_fsdp2.verifier.config.windows import Window
from verified_fsdp2.verifier.config.windows import windows as read
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judging.in_windows import combined, not_compared
from verified_fsdp2.verifier.launch.request import Request
from verified_fsdp2.verifier.probe import starting_point
from verified_fsdp2.verifier.probe.compat.groups import Slot
from verified_fsdp2.verifier.report import RENDERERS
from verified_fsdp2.verifier.report.proved import headline

WINDOW = Window(31, 33, "samples come again")


def batches(number: int, *rows: int) -> list[dict[str, Any]]:
    return [{"kind": "batch", "step": number, "rows": list(rows), "size": len(rows)}]


def survey(made: int, whole: bool = True, **other: list[dict[str, Any]]) -> Any:
    """A survey run of `made` steps, each on samples of its own but for those in `other`."""
    place = {"file": FILE, "line": 20, "function": "main", "code": ""}
    records: list[dict[str, Any]] = [
        {"kind": "reached", "steps": 0, "stack": [place], "sharded": True, "lines": {FILE: [1]}}
    ]
    for number in range(1, made + 1):
        records += other.get(f"step{number}", batches(number, 2 * number, 2 * number + 1))
        records.append({"kind": "reached", "steps": number, "backwards": 1})
    records += [{"kind": "reached", "steps": made, "ended": True}] if whole else []
    return run(records, role="survey", **({} if whole else {"timed_out": True}))


def after_five(found: Any) -> Evidence:
    train = [model()]
    for number in range(1, 6):
        train += [micro(number), step(number), stepped(number)]
    return Evidence(train=run(train), survey=found, sources=SOURCES)


def suggested(found: Any) -> list[str]:
    return [f"{one} {one.reason}" for one in windows(after_five(found))]


def test_the_last_steps_of_a_script_are_a_window() -> None:
    assert suggested(survey(40)) == ["39-40 the last steps"]


def test_nothing_is_left_where_all_steps_are_compared() -> None:
    assert suggested(survey(5)) == []
    assert windows(Evidence()) == []


def test_a_script_that_was_stopped_has_no_last_steps() -> None:
    assert suggested(survey(40, whole=False)) == []


def test_a_new_epoch_and_a_shorter_accumulation_are_windows() -> None:
    other = {"step20": batches(20, 2, 3), "step30": batches(30, 90)}
    assert suggested(survey(40, **other)) == [
        "20-21 samples come again",
        "30-31 1 backward on 1 sample",
        "39-40 the last steps",
    ]


def test_changes_that_follow_one_another_are_one_window() -> None:
    other = {"step38": batches(38, 2, 3), "step37": batches(37, 90)}
    assert suggested(survey(40, **other)) == [
        "37-40 1 backward on 1 sample; samples come again; the last steps"
    ]


@cases(
    "given, expected",
    ("auto", "auto"),
    ("none", "none"),
    ("31-33", (Window(31, 33, "asked for"),)),
    ("118-120, 31", (Window(31, 31, "asked for"), Window(118, 120, "asked for"))),
    (31, (Window(31, 31, "asked for"),)),
)
def test_windows_are_read(given: object, expected: object) -> None:
    assert read(given) == expected


@cases("given", "1-3", "33-31", "a-b", "", "2-200", "-3")
def test_other_windows_are_refused(given: str) -> None:
    with pytest.raises(UserError, match="windows: "):
        read(given)


def test_a_finding_of_a_window_counts_steps_as_the_script_does() -> None:
    own = [Finding("matches-ddp", "pass", "agrees"), Finding("b", "fail", "early")]
    late = Finding(
        "matches-ddp", "fail", "differs from step 1 on, not in steps 2-3; 4 of 4 weights"
    )
    found = combined(own, [(WINDOW, [late, Finding("b", "fail", "late")])])
    assert [one.evidence for one in found] == [
        "in steps 31-33 (samples come again): differs from step 31 on, not in steps 32-33; 4 of 4"
        " weights",
        "early",
    ]


def test_a_window_is_compared_where_an_oracle_agrees_or_a_rule_fails() -> None:
    def why(*found: Finding, agreed: tuple[str, ...] = ()) -> str:
        return not_compared(WINDOW, found, agreed)

    unsure = Finding("matches-ddp", "inconclusive", "other samples at step 1")
    alone = Finding("matches-single-process", "pass", "agrees")
    assert why(unsure) == "matches-ddp: other samples at step 31"
    assert why(unsure, alone) == ""
    # what agreed in the first steps must be comparable here
    assert why(unsure, alone, agreed=("matches-ddp",)) == "matches-ddp: other samples at step 31"
    assert why(unsure, Finding("token-mean-of-means", "fail", "differs")) == ""
    assert why(Finding("matches-ddp", "not_applicable", "")) == "no oracle was run"
    assert why() == ""


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    for _ in range(1 + seed):
        module(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
    return module, optimizer


def share(one: tuple[nn.Module, torch.optim.Optimizer], folder: Path, **request: Any) -> str:
    module, optimizer = one
    slots = [Slot(name, param, None) for name, param in module.named_parameters()]
    asked = Request("", "", "", world_size=1, starting_point=str(folder), **request)
    return starting_point.share(module, slots, asked, 0, 0, [optimizer])


def test_a_window_begins_from_weights_states_and_buffers(tmp_path: Path) -> None:
    one, other = trained(0), trained(1)
    assert share(one, tmp_path, leave_starting_point=True, skip_steps=3) == "left"
    assert share(other, tmp_path, skip_steps=3) == "loaded"
    assert all(
        torch.equal(mine, its)
        for mine, its in zip(
            one[0].state_dict().values(), other[0].state_dict().values(), strict=True
        )
    )
    mine, its = one[1].state_dict()["state"], other[1].state_dict()["state"]
    for number, state in mine.items():
        assert all(torch.equal(value, its[number][key]) for key, value in state.items()), number


def test_the_first_step_loads_weights_alone(tmp_path: Path) -> None:
    one, other = trained(0), trained(1)
    share(one, tmp_path, leave_starting_point=True)
    assert share(other, tmp_path) == "loaded"
    assert torch.equal(next(one[0].parameters()), next(other[0].parameters()))
    assert not torch.equal(*(next(m[0].buffers()) for m in (one, other)))
    assert [m[1].state_dict()["state"][0]["step"].item() for m in (one, other)] == [1, 2]


def test_a_state_that_is_not_there_is_said(tmp_path: Path) -> None:
    share(trained(0), tmp_path, leave_starting_point=True, skip_steps=3)
    module, _ = trained(1)
    plain = torch.optim.SGD(module.parameters(), lr=0.1)
    assert share((module, plain), tmp_path, skip_steps=3) == "no step of 0.weight to load"


SCRIPT = """
import os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
fully_shard(model[0]), fully_shard(model[2]), fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
draws = torch.Generator().manual_seed(1)
for step in range(40):
    batch = torch.randn(8, 8, generator=draws).chunk(world)[rank]
    loss = ((model(batch) - batch.sum(1, keepdim=True)) ** 2).mean()
    loss = loss * (1 + (step >= 30) * FACTOR)
    loss.backward()
    optimizer.step(), schedule.step(), optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.launch
@cases("factor, status", ("0", "pass"), ("rank", "fail"))
def test_a_factor_that_comes_late_is_found_in_the_last_steps(
    verify_script: Any, tmp_path: Path, factor: str, status: str
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("FACTOR", factor))
    verdict = verify_script(path, only=("parity",), steps="auto")
    found = {one.rule: one for one in verdict.findings}["matches-single-process"]
    assert (verdict.verdict, found.status) == (status, status)
    steps = verdict.facts["coverage"]["steps"]
    assert steps == [[1, steps[0][1]], [39, 40]]
    if status == "fail":
        assert found.evidence.startswith("in steps 39-40 (the last steps): ")
        assert "from step 39 on" in found.evidence


def test_reports_list_windows_with_their_reasons() -> None:
    late = {"first": 31, "last": 33, "reason": "samples come again", "compared": True, "why": ""}
    left = {**late, "first": 90, "last": 90, "compared": False, "why": "it takes about 90 s"}
    steps = [[1, 9], [31, 33], [119, 120]]
    found = compared(steps=steps, windows=[late, left])
    assert headline(found)[1].endswith("steps 10-30 and 34-118")
    valid("json", RENDERERS["json"](found))
    lines = [
        "ALSO COMPARED: steps 31-33 (samples come again)",
        "NOT COMPARED: step 90 (samples come again; it takes about 90 s)",
    ]
    for form in ("text", "github", "html"):
        assert all(line in RENDERERS[form](found) for line in lines), form
