"""`--quick` and `--budget`: fewer runs, and a verdict that says what they leave out."""

from pathlib import Path

import pytest

from verified_fsdp2.verifier.config.policy import BY_QUICK
from verified_fsdp2.verifier.config.target import Target, resolve
from verified_fsdp2.verifier.errors import UserError
from verified_fsdp2.verifier.pipeline import verify
from verified_fsdp2.verifier.stages import Settings
from verified_fsdp2.verifier.trace.roles import QUICK as MADE_WITH_QUICK
from verified_fsdp2.verifier.verdict import Verdict

SCRIPT = Path(__file__).parents[1] / "zoo" / "checkpoint_functions.py"
ARGUMENTS = {
    "steps": 5,
    "save_args": "--out {checkpoint} --save-every 3",
    "resume_args": "--resume {checkpoint}",
}


def verdict_with(folder: Path, **flags: object) -> Verdict:
    return verify(resolve(SCRIPT, {**ARGUMENTS, **flags}), folder / "work")


def roles(verdict: Verdict) -> set[str]:
    return {run["role"] for run in verdict.runs}


def test_quick_makes_three_runs_and_skips_what_others_decide(tmp_path: Path) -> None:
    verdict = verdict_with(tmp_path, quick=True)
    judged = {finding.rule: finding.status for finding in verdict.findings}
    assert roles(verdict) == {"train", "reference", "resume"} <= MADE_WITH_QUICK
    assert (verdict.verdict, judged["matches-ddp"], judged["resume-is-exact"]) == (
        "pass",
        "pass",
        "pass",
    )
    skipped = {item["rule"] for item in verdict.skipped if item["reason"] == BY_QUICK}
    assert {
        "matches-single-process",
        "reshard-keeps-trajectory",
    } <= skipped and not skipped & judged.keys()


def test_a_spent_budget_leaves_rules_inconclusive_with_its_name(tmp_path: Path) -> None:
    verdict = verdict_with(tmp_path, budget="0.1s")
    assert (roles(verdict), verdict.verdict) == ({"train"}, "inconclusive")
    found = {finding.rule: finding for finding in verdict.findings}
    for rule in (
        "matches-ddp",
        "matches-single-process",
        "resume-is-exact",
        "incomplete-checkpoint-chosen",
    ):
        assert (found[rule].status, found[rule].evidence) == (
            "inconclusive",
            "left out by --budget 0.1",
        )
    assert found["optim-before-shard"].status == "pass"


@pytest.mark.parametrize(
    "wrong", [{"budget": "0"}, {"budget": "soon"}, {"quick": True, "thorough": True}]
)
def test_wrong_values_are_usage_errors(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError):
        resolve(SCRIPT, wrong)


def test_runs_that_most_rules_need_come_first() -> None:
    settings = Settings(
        Target(SCRIPT), ["matches-ddp", "resume-is-exact", "scheduler-or-progress-not-restored"]
    )
    due = [settings.run(role, 2) for role in ("perturbed", "inspect", "resume")]
    assert [run.role for run in settings.ordered(due)] == ["resume", "perturbed", "inspect"]


def test_a_pass_needs_a_rule_that_was_judged() -> None:
    left = {"rule": "matches-single-process", "reason": BY_QUICK, "until": None}
    nothing = Verdict("pass", {}, {}, [{"role": "train"}], [], skipped=[left])
    assert nothing.decided().verdict == "inconclusive"
