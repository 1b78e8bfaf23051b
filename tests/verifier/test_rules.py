"""The judgement of single rules on manual records: the borderline cases, in milliseconds."""

from dataclasses import replace
from typing import Any

import pytest

from records import (
    LINE,
    cases,
    entropy,
    judge,
    judged_as,
    micro,
    model,
    parameter,
    row,
    run,
    step,
    stepped,
    wrap,
)
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judge import judge_one
from verified_fsdp2.verifier.judging.all_findings import without_effect
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.base import SourceRule
from verified_fsdp2.verifier.rules.policies import ShownBy


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_without_evidence_proves_nothing(rule: str) -> None:
    found = judge_one(RULES[rule], Evidence())
    # what only the sources show is not covered where nothing of them was followed
    status = "not_covered" if isinstance(RULES[rule], SourceRule) else "inconclusive"
    if rule == "unused-suppression":  # no comment is known
        status = "not_applicable"
    assert (found.status, found.rule) == (status, rule)
    assert found.evidence


MEANS, SCALE = "token-mean-of-means", "double-or-missing-world-scale"
CLIP, SAME = "manual-local-norm-clip", "same-data-on-every-rank"
PLAIN = [model(), micro(), step(), stepped()]


@cases(
    "losses, values, reduction, measured",
    ((2.0, 3.0), (2.0, 3.0), "mean", 8.0),  # equal weights on unequal counts
    ((0.4, 5.4), (2.0, 3.0), "mean", None),  # weights in proportion
    ((20 / 50, 270 / 50), (20.0, 270.0), "sum", None),  # sums divided by the global count
)
def test_unequal_counts(losses: Any, values: Any, reduction: str, measured: float | None) -> None:
    ranks = [
        [
            model(),
            micro(loss=losses[k], criteria=entropy(count, losses[k] / values[k], reduction)),
            step(),
            stepped(),
        ]
        for k, count in enumerate((10, 90))
    ]
    found = judge(MEANS, *ranks)
    assert found.status == ("pass" if measured is None else "fail")
    assert measured is None or found.measured == pytest.approx(measured)


def summed(loss: float, *before: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Two ranks with a mean cross entropy of 2, and this loss."""
    return [
        [model(), *before, micro(loss=loss, criteria=entropy(10, loss / 2.0)), step(), stepped()]
    ] * 2


def off(scale: float, copy: int) -> list[dict[str, Any]]:
    """A gradient of one parameter is `scale` times as large as it should be."""
    grads = {"a": [1.0, 1.0, 2.0, 3.0, 4.0], "b": [scale * x for x in (scale, 1.0, 2.0, 3.0, 4.0)]}
    return [
        model(parameter("a", copy), parameter("b", copy)),
        micro(rows=(1,)),
        step(grads=grads),
        stepped(),
    ]


OTHER_LOSS = [model(), micro(rows=(1, 2)), step(), stepped()]
TWO_TERMS = [model(), micro(rows=(1, 2), criteria=[*entropy(4, 1.0), *entropy(5, 1.0)]), *PLAIN[2:]]
ALONE = run([model(), micro(rows=(1, 1)), *off(1.0, 0)[2:]])
test_means_and_scales = judged_as(
    row(MEANS, "not_applicable", *summed(2.0)),  # equal counts show nothing
    row(MEANS, "inconclusive", TWO_TERMS, TWO_TERMS),
    row(MEANS, "not_applicable", OTHER_LOSS, OTHER_LOSS),
    row(
        MEANS,
        "not_applicable",
        TWO_TERMS,
        TWO_TERMS,
        single=run([model(), micro(rows=(1, 2, 1, 2)), *PLAIN[2:]]),
    ),
    # Factors of 1/2 and 2 at two ranks are faults; one of 1.5 is a weight of the script's own.
    *(
        row(SCALE, status, *summed(k))
        for k, status in ((2.0, "pass"), (1.0, "fail"), (4.0, "fail"), (3.0, "pass"))
    ),
    row(
        SCALE, "pass", *summed(1.0, {"kind": "divide", "factor": 1.0})
    ),  # a divide factor of the script counts
    *(
        row(SCALE, status, off(scale, 0), off(scale, 1), single=ALONE)
        for scale, status in ((1.0, "pass"), (2.0, "fail"), (0.5, "fail"), (1.5, "pass"))
    ),
)


def clipped(*scales: float, collinear: bool = True) -> dict[str, Any]:
    """A provoked run whose ranks scaled their gradients by these factors."""
    ranks = []
    for scale in scales:
        products = [4.0, (4.0 if collinear else 2.0) * scale, 4.0 * scale**2]
        ranks.append([*PLAIN, {"kind": "stress", "factor": 1e6, "products": {"w": products}}])
    return {"provoked": run(*ranks, role="provoked")}


QUIET = {"provoked": run(PLAIN, PLAIN), "gradients": True}  # it stopped before its step
CLIPS = Sources({"train.py": "def clip(p):\n    p.grad.div_(p.grad.norm())\n"}, ("train.py",))
test_clipping = judged_as(
    row(CLIP, "inconclusive", PLAIN, PLAIN, **QUIET, sources=CLIPS),
    row(CLIP, "not_applicable", PLAIN, PLAIN, **QUIET),  # nothing may clip
    row(
        CLIP, "not_applicable", PLAIN, PLAIN, provoked=run(PLAIN, PLAIN)
    ),  # made for uninitialised memory
    row(CLIP, "not_applicable", PLAIN, PLAIN),  # nothing touches gradients
    row(CLIP, "pass", PLAIN, PLAIN, **clipped(1e-6, 1e-6)),
    row(CLIP, "fail", PLAIN, PLAIN, **clipped(1e-6, 1.1e-6)),
    row(CLIP, "not_applicable", PLAIN, PLAIN, **clipped(1.0, 1.0)),  # no clipping
    row(
        CLIP, "not_applicable", PLAIN, PLAIN, **clipped(1e-6, 3e-6, collinear=False)
    ),  # by value, not by norm
    row(CLIP, "inconclusive", PLAIN, **clipped(1e-6)),  # one rank cannot show it
)


def test_a_clip_on_local_norms_is_a_fault_where_the_norm_is_taken() -> None:
    taken = {"kind": "clips", "at_line": replace(LINE, line=7)}
    train = run([*PLAIN[:2], taken, *PLAIN[2:]], PLAIN)
    finding = judge_one(
        RULES[CLIP], Evidence(train=train, full_precision=train, **clipped(1e-6, 3e-6))
    )
    assert (finding.status, finding.location) == ("fail", taken["at_line"])


def plain(*gradients: float) -> list[list[dict[str, Any]]]:
    whole = [
        {"kind": "shard", "parameters": []},
        model(parameter(), parameter("head", managed=False, sharded=False)),
    ]
    return [
        [*whole, micro(), step(grads={"head": [first, 1, 0, 0, 0]}), stepped()]
        for first in gradients
    ]


def fed(
    *rows: tuple[int, ...], first: tuple[dict[str, Any], ...] = (), **more: Any
) -> list[list[dict[str, Any]]]:
    return [[*first, model(), micro(rows=own, **more), step(), stepped()] for own in rows]


test_the_status = judged_as(
    row("root-not-wrapped", "pass", *plain(1.0, 1.0)),
    row("root-not-wrapped", "fail", *plain(1.0, 2.0), names=("head",)),
    row(SAME, "fail", *fed((1, 2), (1, 2))),
    row(SAME, "fail", *fed((1, 2), (2, 1))),
    row(SAME, "pass", *fed((1, 2), (1, 3))),
    row(SAME, "inconclusive", *fed((), ())),
    # A graph is given to all ranks, and each takes its own nodes: equal generators, other losses.
    row(SAME, "pass", *fed((1, 2), loss=1.0), *fed((1, 2), loss=2.0)),
    row(SAME, "fail", *fed((1, 2), loss=1.0), *fed((1, 2), loss=2.0, random="other")),
    # The mesh that fully_shard is given is the data-parallel one; ranks outside, of one group of
    # tensor parallelism, may share.
    row(SAME, "pass", *fed((1,), (1,), (2,), (2,), first=(wrap([0, 2]),))),
)


class TestResume:
    def pair(self, **resumed: Any) -> Evidence:
        save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "", "keys": []}
        state = {"state": {"w": {"exp_avg": [1.0] * 5, "step": 1.0}}}
        train = [model(), micro(1, rows=(1,)), step(1), stepped(1), save]
        train += [micro(2, rows=(2,)), step(2, **state), stepped(2)]
        rows = {"rows": resumed.pop("rows", (2,))}
        again = [model(), micro(1, **rows), step(1, **{**state, **resumed}), stepped(1)]
        return Evidence(
            train=run(train), full_precision=run(train), resume=run(again, role="resume")
        )

    @cases(
        "rule, resumed",
        ("load-without-set", {"weights": {"w": [1.0, 0.0, 0.0, 0.0, 0.0]}}),
        ("optim-template-empty", {"state": {}}),
        ("optim-template-empty", {"state": {"w": {"exp_avg": [0.0] * 5, "step": 1.0}}}),
        ("scheduler-or-progress-not-restored", {"lr": [0.2]}),
        ("scheduler-or-progress-not-restored", {"rows": (1,)}),
    )
    def test_what_does_not_come_back(self, rule: str, resumed: dict[str, Any]) -> None:
        assert judge_one(RULES[rule], self.pair()).status == "pass"
        assert judge_one(RULES[rule], self.pair(**resumed)).status == "fail"

    def test_a_schedule_that_goes_on_with_a_rate_that_does_not(self) -> None:
        def steps(rates: list[float], first: int) -> list[dict[str, Any]]:
            made = [
                (micro(k, rows=(k + first,)), step(k, lr=[rate]), stepped(k))
                for k, rate in enumerate(rates, 1)
            ]
            return [model(), *(record for one in made for record in one)]

        save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "", "keys": []}
        whole = steps([0.1, 0.2, 0.3], 0)
        trained = run([*whole[:4], save, *whole[4:]])
        for later, alone in ((0.3, True), (0.4, False)):
            evidence = Evidence(
                train=trained,
                full_precision=trained,
                resume=run(steps([0.9, later], 1), role="resume"),
            )
            finding = judge_one(RULES["scheduler-or-progress-not-restored"], evidence)
            assert finding.status == "fail"
            assert ("param_groups" in (finding.fix or "")) == alone

    def test_what_comes_back_in_fewer_bits(self) -> None:
        near = {"w": [1.0, 1.001, 0.002, -0.001, 0.0]}
        finding = judge_one(RULES["load-without-set"], self.pair(weights=near, halved=["w"]))
        assert "rounded to a 16-bit type" in finding.evidence
        assert "casts them" in finding.fix
        for other in (
            {"weights": near},
            {"weights": {"w": [1.0, 1.1, 0.2, 0.0, 0.0]}, "halved": ["w"]},
        ):
            finding = judge_one(RULES["load-without-set"], self.pair(**other))
            assert finding.status == "fail"
            assert "rounded" not in finding.evidence


@cases("shown, warns", ("pass", True), ("inconclusive", False), ("fail", False))
def test_a_cause_whose_effect_a_run_would_have_shown_is_a_warning(shown: str, warns: bool) -> None:
    policies = {name: rule.policy(ShownBy) for name, rule in RULES.items()}
    causes = {name: policy.rule for name, policy in policies.items() if policy}
    assert set(causes.values()) <= set(RULES) and "optim-template-empty" in causes
    for name, effect in causes.items():
        cause, _ = without_effect(
            [Finding(name, "fail", "it is so"), Finding(effect, shown, "")], Evidence()
        )
        assert (cause.warns, effect in cause.evidence) == (warns, warns)


@cases("weights, shared", ((0.5, 0.5), True), ((1 / 3, 2 / 3), False))
def test_an_oracle_with_the_same_cause_excuses_nothing(
    weights: tuple[float, float], shared: bool
) -> None:
    """One process with two micro-batches, of 4 and of 8 targets: a mean of their means, and the
    mean of all targets.
    """
    micros = [micro(criteria=entropy(n, w)) for n, w in zip((4, 8), weights, strict=True)]
    evidence = Evidence(single=run([model(), *micros, step(), stepped()], role="single"))
    shown = RULES[MEANS].policy(ShownBy)
    assert shown is not None and shown.unless is not None and shown.unless(evidence) is shared
    findings = [Finding(MEANS, "fail", "it is so"), Finding(shown.rule, "pass", "")]
    assert without_effect(findings, evidence)[0].warns is not shared
