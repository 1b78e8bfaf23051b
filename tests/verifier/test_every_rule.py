"""Every rule on a run that is cut after each event, and on evidence that makes it fail itself."""

from dataclasses import replace
from typing import Any

import pytest

from records import ended, entropy, micro, model, parameter, run, step, stepped, wrap
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.judge import judge_one
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.base import SourceRule

JUDGED_ON_RUNS = [name for name, rule in RULES.items() if not isinstance(rule, SourceRule)]


def one_step(number: int, rows: tuple[int, ...]) -> list[dict[str, Any]]:
    state = {"kind": "state", "step": number, "values": {}}
    batch = micro(number, 2.0 / number, rows, criteria=entropy(4, 1.0))
    return [state, batch, step(number), stepped(number)]


def recorded(rank: int) -> list[dict[str, Any]]:
    rows = [(10 * k + rank,) for k in range(3)]
    return [
        {"kind": "start", "torch": "2.13.0"},
        {"kind": "shard", "modules": [""], "param_dtype": None, "parameters": []},
        wrap([0, 1]),
        model(parameter(sketch=[1.0, 1.0 - rank, 0.0, 0.0, 0.0])),
        *one_step(1, rows[1]),
        *one_step(2, rows[2]),
    ]


@pytest.mark.parametrize("name", JUDGED_ON_RUNS)
def test_a_run_that_is_cut_is_never_an_error(name: str) -> None:
    for after in range(len(recorded(0)) + 1):
        train = ended(run(recorded(0)[:after], recorded(1)[:after]))
        found = judge_one(RULES[name], Evidence(train=train, full_precision=train))
        assert found.status in ("pass", "inconclusive", "not_covered", "not_applicable", "fail"), (
            after,
            found.evidence,
        )
        assert found.status != "fail" or name == "run-completes", (after, found.evidence)


class Broken:
    def __getattr__(self, name: str) -> Any:
        raise OSError("cannot be read")


@pytest.mark.parametrize("name", RULES)
def test_an_error_in_a_rule_is_an_error_finding(name: str) -> None:
    found = judge_one(RULES[name], Broken())  # type: ignore[arg-type]
    assert (found.status, found.rule) == ("error", name)
    assert "cannot be read" in found.evidence


@pytest.mark.parametrize("name", JUDGED_ON_RUNS)
def test_a_right_run_fails_nothing(name: str) -> None:
    train = run(recorded(0), recorded(1))
    evidence = Evidence(train=train, full_precision=train, provoked=replace(train, role="provoked"))
    assert judge_one(RULES[name], evidence).status in (
        "pass",
        "not_applicable",
        "not_covered",
        "inconclusive",
    )
