"""Where rules do not apply: what the script has nothing of, apart from what a run has not come to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_rules_checkpoint import A, saving, tensor, train

from records import LINE, cases, end, ended, judge, micro, model, run, step, stepped
from scripts import written
from verified_fsdp2.verifier.evidence import Course
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.trace import Run


class TestNotApplicable:
    """What the script has nothing of; a run that stopped early might still have come to it."""

    @cases(
        "rule, resumed",
        *((rule, False) for rule in ("async-save-process-group", "async-save-state-race", "full-state-dict-oom")),
        ("rank-dependent-checkpoint-path", False),
        *((rule, True) for rule in ("lenient-load-hides-mismatch", "optim-template-with-grads")),
    )
    def test_nothing_of_the_kind(self, rule: str, resumed: bool) -> None:
        def judged(make: Any) -> str:
            runs = {"resume": make(replace(self.saved(), role="resume"))} if resumed else {}
            return judge(rule, make(self.saved()), **runs).status

        assert judged(lambda made: made) == "not_applicable"
        assert judged(ended) == "inconclusive"
        if resumed:
            assert judge(rule, self.saved(), missing={"resume": "no arguments"}).evidence == "no arguments"

    @staticmethod
    def saved() -> Run:
        state = {"w": {"exp_avg": A}}
        rank = [model(), step(), stepped(), step(2, state=state), stepped(2)]
        return run([*rank, saving({"w": tensor()}, "torch.save", "/c/a.pt")], rank)

    @pytest.mark.parametrize("rule", ["local-shard-export", "per-rank-state-deduplicated", "full-state-dict-oom"])
    def test_one_rank(self, rule: str) -> None:
        alone = train([saving({"w": tensor()}, "torch.save", "/c/a.pt")])
        assert judge(rule, alone).status == "not_applicable"

    @pytest.mark.parametrize("rule", ["wrapper-prefix-keys", "checkpoint-holds-what-ranks-held"])
    def test_no_tensor_is_saved(self, rule: str) -> None:
        number = {"kind": "value", "value": "3"}
        assert judge(rule, train([saving({"step": number})], [])).status == "not_applicable"

    @pytest.mark.parametrize(
        "rule", ["optim-template-empty", "optim-template-with-grads", "missing-optim-state-for-unused-param"]
    )
    def test_an_optimizer_without_state(self, rule: str) -> None:
        plain = [model(), step(), stepped(), saving({}), step(2), stepped(2)]
        assert judge(rule, run(plain, plain)).status == "not_applicable"
        assert judge(rule, self.saved()).status == "inconclusive"

    @pytest.mark.parametrize("rule", [n for n, rule in RULES.items() if rule.family == "checkpoint"])
    def test_a_script_without_checkpoints(self, rule: str) -> None:
        assert judge(rule, train([], [])).status == "not_applicable"
        assert judge(rule, train([], []), saving=LINE).status == "inconclusive", "its sources can save"

    @pytest.mark.parametrize("rule", ["resume-is-exact", "load-without-set", "incomplete-checkpoint-chosen"])
    def test_arguments_to_resume_say_that_there_are_checkpoints(self, rule: str) -> None:
        assert judge(rule, train([], []), course=Course(resumes=True)).status == "inconclusive"

    def test_an_error_is_judged_before_anything_was_saved(self) -> None:
        text = "Can't pickle <class 'torch.distributed.fsdp._fully_shard._fsdp_init.FSDPLinear'>: attribute lookup"
        rank = [model(), step(), stepped(), end("PicklingError", text)]
        for more in ({}, {"saving": LINE}):
            assert judge("pickled-fsdp-model", rank, rank, **more).status == "fail"


def test_ranks_that_share_their_samples() -> None:
    rows = [model(), micro(1, 1.0, tuple(range(8))), step(1), stepped(1)]
    parallel = [{"kind": "wrap", "mesh": {"shape": [1], "names": [], "ranks": [0]}, "modules": []}, *rows]
    for ranks in ([rows], [parallel, parallel]):
        assert judge("same-data-on-every-rank", *ranks).status == "not_applicable"


def test_a_script_that_was_converted_from_nothing() -> None:
    mine = train([], [])
    assert judge("matches-original", mine).status == "not_applicable"
    assert judge("matches-original", mine, missing={"original": "it failed"}).status == "inconclusive"


@cases("call, how, status", ([{"kind": "set_epoch"}], "stopped", "pass"), ([], "return", "not_applicable"))
def test_a_sampler_with_one_epoch(call: list[dict[str, Any]], how: str, status: str) -> None:
    order = {"kind": "sampler", "dataset": 1, "epoch": 0, "shuffle": True, "seed": 0, "samples": 8}
    rank = [model(), *call, order, micro(), micro(), step(), stepped()]
    assert judge("set-epoch-missing", ended(run(rank, rank), how)).status == status


def test_a_script_without_training_is_inconclusive(verify_script: Any, tmp_path: Path) -> None:
    verdict = verify_script(written(tmp_path, "print('nothing to train')\n"))
    assert verdict.verdict == "inconclusive"
    assert "fail" not in {f.status for f in verdict.findings}
    inconclusive = {f.rule for f in verdict.findings if f.status == "inconclusive"}
    assert {"root-not-wrapped", "optim-before-shard", "matches-ddp", "resume-is-exact", "run-completes"} <= inconclusive
