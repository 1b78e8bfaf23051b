"""Rules that name an error of torch: each on the text that torch 2.13.0 really gave, and none on a
neighbour's text.

A rule without a row in raised.yaml is tried on the texts that its page or references/diagnosis.md
shows.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from documents import diagnosis
from records import cases, end, judge, model, parameter, run, step, stepped
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.judge import judge_one
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.base import RaisedRule
from verified_fsdp2.verifier.trace import Run

NAMES = [name for name, rule in RULES.items() if isinstance(rule, RaisedRule)]
MIXED = (
    "got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling"
    " distributed operators!"
)
TORCH = "/lib/python3.11/site-packages/torch"

SHARDED = {"kind": "shard", "at": 60}


def line(number: int, function: str = "main") -> dict[str, Any]:
    return {"file": "train.py", "line": number, "function": function, "code": f"line {number}"}


def frame(number: int, function: str = "main", **of: Any) -> dict[str, Any]:
    return {"file": "train.py", "line": number, "function": function, "own": True, **_whole(of)}


def inner(file: str, function: str, **of: Any) -> dict[str, Any]:
    return {"file": f"{TORCH}/{file}", "line": 1, "function": function, "own": False, **_whole(of)}


def _whole(of: dict[str, Any]) -> dict[str, Any]:
    base = {"number": 0, "fsdp": True, "shards": 0, "shards_below": 9, "tensors": {}, "buffers": {}}
    return {**base, **of} if "module" in of else of


def shard(number: int, **more: Any) -> dict[str, Any]:
    base = {
        "kind": "shard",
        "modules": ["M"],
        "param_dtype": None,
        "output_dtype": None,
        "parameters": [],
    }
    return {**base, "at_line": line(number), **more}


def expanded(case: dict[str, Any]) -> tuple[Any, ...]:
    """(rule, errors, frames, records, line to change) of an entry of raised.yaml."""
    frames, records = [], []
    for one in case.get("frames", [{"line": case.get("at")}]):
        of = {
            key: value
            for key, value in one.items()
            if key not in ("line", "torch", "file", "function")
        }
        if "line" in one:
            frames.append(frame(one["line"], one.get("function", "main"), **of))
        else:
            made = inner(one.get("torch", ""), one["function"], **of)
            frames.append({**made, "file": one.get("file", made["file"])})
    for one in case.get("records", ()):
        at = {"at_line": line(one["at"])} if "at" in one else {}
        own = {key: value for key, value in one.items() if key != "at"} | at
        if own["kind"] == "shard":
            own = {**shard(0), **own}
        if own["kind"] == "model":
            own = {**model(*(parameter(**p) for p in one.get("parameters", ()))), **at}
        records.append(own)
    errors = [text.replace("MIXED", MIXED).split(": ", 1) for text in case["errors"]]
    return case.get("rule"), errors, frames, records, case.get("at")


ENTRIES = [
    expanded(case)
    for case in yaml.safe_load(Path(__file__).with_name("raised.yaml").read_text(encoding="utf-8"))
]
IN_TABLE = {rule for rule, *_ in ENTRIES}
ENTRIES += [
    expanded(
        {
            "rule": name,
            "at": 90,
            "errors": [f"RuntimeError: {text.replace('...', 'x')}"],
            "records": [SHARDED],
        }
    )
    for name in NAMES
    if name not in IN_TABLE
    for row in diagnosis()
    if name in row.rules
    for text in row.texts
]
CASES = [(rule, *error, *more) for rule, errors, *more in ENTRIES if rule for error in errors]
OTHERS = [(*error, *more[:2]) for rule, errors, *more in ENTRIES if not rule for error in errors]


def stopped(
    error: str, message: str, frames: list[dict[str, Any]], records: list[dict[str, Any]]
) -> Run:
    own = [line(f["line"], f["function"]) for f in frames if f["own"]]
    rows = [
        *records,
        {"kind": "raised", "error": error, "frames": frames},
        end(error, message, frames=own),
    ]
    return run([{"at_line": None, **row} for row in rows])


@cases("rule, error, message, frames, records, where", *CASES)
def test_one_rule_names_it(
    rule: str, error: str, message: str, frames: Any, records: Any, where: int
) -> None:
    evidence = Evidence(train=stopped(error, message, frames, records))
    found = {name: judge_one(RULES[name], evidence) for name in NAMES}
    assert [name for name, f in found.items() if f.status == "fail"] == [rule]
    assert error in found[rule].evidence and found[rule].fix
    assert found[rule].location.line == where
    assert {f.status for name, f in found.items() if name != rule} == {"inconclusive"}


@pytest.mark.parametrize(("error", "message", "frames", "records"), OTHERS)
def test_no_rule_names_what_is_none_of_theirs(
    error: str, message: str, frames: list[Any], records: list[Any]
) -> None:
    evidence = Evidence(train=stopped(error, message, frames, records))
    assert [name for name in NAMES if judge_one(RULES[name], evidence).status == "fail"] == []


def test_plain_weights_in_an_optimizer_are_the_root_rules() -> None:
    for error, message, frames, records in OTHERS[2:4]:
        made = stopped(error, message, frames, [shard(60), *records])
        two = replace(made, world_size=2, traces=(made.traces[0], replace(made.traces[0], rank=1)))
        assert judge("root-not-wrapped", two).status == "fail"


def test_the_dtypes_at_the_line_are_named() -> None:
    case = next(c for c in CASES if c[0] == "buffers-and-odd-inputs-not-cast")
    found = RULES[case[0]].judge(Evidence(train=stopped(*case[1:5])))
    assert all(part in found.evidence for part in ("x is bfloat16", "self.mix is float32"))


def test_a_parameter_without_gradients_is_named_before_any_resume() -> None:
    save = {"kind": "checkpoint", "op": "save", "after_step": 1}
    grads = {"w": [1.0, 0.5, 0.0, 0.0, 0.0], "unused": None}
    records = [model(parameter(), parameter("unused")), step(grads=grads), stepped(), save]
    found = judge("missing-optim-state-for-unused-param", records)
    assert (found.status, "unused" in found.evidence) == ("inconclusive", True)


def test_every_error_is_tried() -> None:
    untried = sorted(set(NAMES) - {case[0] for case in CASES})
    assert not untried, (
        f"{untried}: write the text of the error in backquotes into the section `Seen:`"
    )


def test_too_few_ranks_name_the_option() -> None:
    message = "Mesh should not be bigger than default world size 2, but found 8 ranks!"
    found = judge_one(
        RULES["mesh-refused"], Evidence(train=stopped("RuntimeError", message, [frame(60)], []))
    )
    assert "--nproc 8" in (found.fix or "")
