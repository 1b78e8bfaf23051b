"""Where rules do not apply: what the script has nothing of, apart from what a run has not come
to.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from test_rules_checkpoint import A, saving, tensor, train

from records import (
    LINE,
    cases,
    end,
    ended,
    judge,
    judged_as,
    micro,
    model,
    row,
    run,
    step,
    stepped,
    wrap,
)
from scripts import written
from verified_fsdp2.verifier.analysis.applicability import unnamed
from verified_fsdp2.verifier.evidence import Course, Sources
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.trace import Run


def saved() -> Run:
    state = {"w": {"exp_avg": A}}
    rank = [model(), step(), stepped(), step(2, state=state), stepped(2)]
    return run([*rank, saving({"w": tensor()}, "torch.save", "/c/a.pt")], rank)


@cases(
    "rule, resumed",
    *(
        (rule, False)
        for rule in ("async-save-process-group", "async-save-state-race", "full-state-dict-oom")
    ),
    ("rank-dependent-checkpoint-path", False),
    *((rule, True) for rule in ("lenient-load-hides-mismatch", "optim-template-with-grads")),
)
def test_nothing_of_the_kind(rule: str, resumed: bool) -> None:
    """A run that stopped early might still have come to it."""

    def judged(make: Any) -> str:
        runs = {"resume": make(replace(saved(), role="resume"))} if resumed else {}
        return judge(rule, make(saved()), **runs).status

    assert judged(lambda made: made) == "not_applicable"
    assert judged(ended) == "inconclusive"
    if resumed:
        assert judge(rule, saved(), missing={"resume": "no arguments"}).evidence == "no arguments"


ALONE = train([saving({"w": tensor()}, "torch.save", "/c/a.pt")])
NUMBER = train([saving({"step": {"kind": "value", "value": "3"}})], [])
STATELESS = [model(), step(), stepped(), saving({}), step(2), stepped(2)]
NOTHING = train([], [])
LOCAL_CLASS = (
    "Can't pickle <class 'torch.distributed.fsdp._fully_shard._fsdp_init.FSDPLinear'>: attribute"
    " lookup"
)
PICKLED = [model(), step(), stepped(), end("PicklingError", LOCAL_CLASS)]
FED = [model(), micro(1, 1.0, tuple(range(8))), step(1), stepped(1)]
TEMPLATES = (
    "optim-template-empty",
    "optim-template-with-grads",
    "missing-optim-state-for-unused-param",
)
OF_CHECKPOINTS = [name for name, rule in RULES.items() if rule.family == "checkpoint"]
OF_RESUMES = ("resume-is-exact", "load-without-set", "incomplete-checkpoint-chosen")
test_the_status = judged_as(
    *(
        row(rule, "not_applicable", ALONE)  # one rank
        for rule in ("local-shard-export", "per-rank-state-deduplicated", "full-state-dict-oom")
    ),
    *(
        row(rule, "not_applicable", NUMBER)
        for rule in ("wrapper-prefix-keys", "checkpoint-holds-what-ranks-held")
    ),
    *(row(rule, "not_applicable", STATELESS, STATELESS) for rule in TEMPLATES),
    *(row(rule, "inconclusive", saved()) for rule in TEMPLATES),
    *(row(rule, "not_applicable", NOTHING) for rule in OF_CHECKPOINTS),
    *(
        row(rule, "not_covered", NOTHING, saving=LINE) for rule in OF_CHECKPOINTS
    ),  # its sources can save
    *(row(rule, "inconclusive", NOTHING, course=Course(resumes=True)) for rule in OF_RESUMES),
    *(
        row("pickled-fsdp-model", "fail", PICKLED, PICKLED, **more)
        for more in ({}, {"saving": LINE})
    ),  # not yet saved
    row("same-data-on-every-rank", "not_applicable", FED),
    row(
        "same-data-on-every-rank", "not_applicable", *[[wrap([0]), *FED]] * 2
    ),  # ranks that share their samples
    row("matches-original", "not_applicable", NOTHING),
    row("matches-original", "inconclusive", NOTHING, missing={"original": "it failed"}),
)


@cases(
    "call, how, status",
    ([{"kind": "set_epoch"}], "stopped", "pass"),
    ([], "return", "not_applicable"),
)
def test_a_sampler_with_one_epoch(call: list[dict[str, Any]], how: str, status: str) -> None:
    order = {"kind": "sampler", "dataset": 1, "epoch": 0, "shuffle": True, "seed": 0, "samples": 8}
    rank = [model(), *call, order, micro(), micro(), step(), stepped()]
    assert judge("set-epoch-missing", ended(run(rank, rank), how)).status == status


def test_a_script_without_training_is_inconclusive(verify_script: Any, tmp_path: Path) -> None:
    verdict = verify_script(written(tmp_path, "print('nothing to train')\n"))
    assert verdict.verdict == "inconclusive"
    assert "fail" not in {f.status for f in verdict.findings}
    inconclusive = {f.rule for f in verdict.findings if f.status == "inconclusive"}
    assert {
        "root-not-wrapped",
        "optim-before-shard",
        "matches-ddp",
        "resume-is-exact",
        "run-completes",
    } <= inconclusive


@cases(
    "text, uses",
    ("from a.b import setter", False),
    ("from a.b import setter\nsetter()", True),
    ("from a.b import setter as other\nother()", True),
    ("import a.b as b\nb.setter()", True),
    ("getattr(b, 'setter')()", True),
)
def test_a_name_that_is_imported_and_not_used(text: str, uses: bool) -> None:
    assert (unnamed(Sources({"a.py": text}, ("a.py",)), "setter") == "") == uses
