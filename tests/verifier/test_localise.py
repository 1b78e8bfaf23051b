"""Where two runs part and what that means, on manual records: one pattern of disagreement each."""

import math
from dataclasses import replace
from typing import Any

import pytest

from records import DIRECTION, LINE, NAMES, cases, end, judge, micro, model, run, trained, wrap
from verified_fsdp2.verifier.analysis.comparison import MEASURES, compare
from verified_fsdp2.verifier.analysis.gradient_scale_causes import (
    DIVIDED_TWICE,
    NOT_DIVIDED,
    readings,
)
from verified_fsdp2.verifier.analysis.limits import limits
from verified_fsdp2.verifier.analysis.localise import (
    meaning,
    part,
    reduced_after_backward,
    where,
)
from verified_fsdp2.verifier.config.policy import Widening
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.tolerances import CANCELLED, FLOOR
from verified_fsdp2.verifier.trace import Run
from verified_fsdp2.verifier.trace.events import Micro, ProgressEvent, Step

ALLOWED = dict.fromkeys(MEASURES, FLOOR)


def said(mine: Run, oracle: Run, label: str = "DDP", other: str | None = None) -> str:
    parting = part(mine, oracle, ALLOWED)
    return f"{where(parting)}; {meaning(parting, mine, label, other, None, ALLOWED)}"


@cases("factor", 0.5, 2.0, 0.25, 4.0)
def test_ranks_that_share_their_samples_do_not_divide(factor: float) -> None:
    ranks = [[wrap([0, 2]), micro(1)] for _ in range(4)]  # 2 x 2, with tensor parallelism
    assert {reading.cause for reading in readings(factor, run(*ranks))} == {"ranks"}


@cases(
    "factor, causes",
    *((2.0, {"ranks"}), (0.5, {"ranks"}), (6.0, {"both"})),
    *((3.0, {NOT_DIVIDED}), (1 / 3, {DIVIDED_TWICE}), (1.1, set())),
)
def test_a_factor_on_every_gradient(factor: float, causes: set[str]) -> None:
    mine, oracle = trained(2, factor, micros=3), trained(2)
    parting = part(mine, oracle, ALLOWED)
    assert (parting.stage, parting.factor, parting.parameters) == (
        "gradient",
        pytest.approx(factor),
        NAMES,
    )
    assert {reading.cause for reading in readings(factor, mine)} == causes
    assert f"{factor:.4g} x" in said(mine, oracle)


def test_a_factor_on_one_module_and_factors_that_differ() -> None:
    mine = trained(2, {"blocks.1.up.weight": 2.0, "blocks.1.down.weight": 2.0})
    parting = part(mine, trained(2), ALLOWED)
    assert (parting.stage, parting.module, parting.factor) == ("gradient", "blocks.1", 2.0)
    assert parting.parameters == ("blocks.1.up.weight", "blocks.1.down.weight")
    words = ("2 of 5 parameters", "all under blocks.1", "first blocks.1.up.weight")
    assert all(text in where(parting) for text in words)
    parting = part(trained(2, {"embed.weight": 2.0, "head.weight": 3.0}), trained(2), ALLOWED)
    assert (parting.factor, parting.parameters, parting.module) == (
        None,
        ("embed.weight", "head.weight"),
        "",
    )


STAGES: list[tuple[dict[str, Any], str, int, float | None]] = [
    ({"at_step": 0.5}, "clip", 1, 0.5),
    ({"moves": ({"head.weight": 0.05}, {}, {})}, "optimizer", 1, None),
    ({"moves": ({}, {"head.weight": 0.05}, {})}, "later", 2, None),
    ({"losses": (3.0, 2.0, 1.5)}, "later", 3, None),
    ({"losses": (6.0, 4.0, 2.0)}, "loss", 1, None),
]


@pytest.mark.parametrize(("changed", "stage", "step", "factor"), STAGES)
def test_the_first_stage_that_differs(
    changed: dict[str, Any], stage: str, step: int, factor: float | None
) -> None:
    parting = part(trained(2, **changed), trained(2), ALLOWED)
    assert (parting.stage, parting.step, parting.factor) == (stage, step, factor)
    if "moves" in changed:
        assert (parting.module, parting.parameters) == ("head", ("head.weight",))


def test_every_stage_and_the_other_oracle_have_a_message_of_their_own() -> None:
    assert len({said(trained(2, **changed), trained(2)) for changed, *_ in STAGES}) == len(STAGES)
    mine, oracle = trained(2, 1.1), trained(1)
    assert (
        len({said(mine, oracle, "one process", other) for other in ("agrees", "differs", None)})
        == 3
    )
    assert len({said(mine, trained(2), "DDP", other) for other in ("differs", None)}) == 2


def test_what_only_the_division_over_ranks_changes() -> None:
    def known(mine: Run, oracle: Run) -> str:
        return meaning(part(mine, oracle, ALLOWED), mine, "one process", "agrees", oracle, ALLOWED)

    assert "1/sqrt(2): the squared norm counts each gradient 2 times" in known(
        trained(2, at_step=0.5**0.5), trained(1)
    )
    assert "depends on the number of ranks" in known(trained(2, at_step=0.9), trained(1))
    other = {"embed.weight": 2.0, "head.weight": 3.0}  # no one factor
    assert "must pass gradients back" in known(trained(2, other), trained(1))
    by_loss = (trained(2, other, losses=(loss, 2.0, 1.0)).traces for loss in (3.0, 5.0))
    ranks = replace(
        trained(2, other), traces=tuple(traces[rank] for rank, traces in enumerate(by_loss))
    )
    text = known(ranks, trained(1, losses=(3.5, 2.0, 1.0)))
    assert "3.5, between the 3 and 5 of the ranks" in text and "75% to 25%" in text
    assert "count of its own" not in known(ranks, trained(1, losses=(6.0, 2.0, 1.0)))


def test_ranks_with_parts_of_the_samples() -> None:
    mine = trained(2, {"embed.weight": 2.0, "head.weight": 3.0})
    alone = trained(1, losses=(3.5, 2.0, 1.0))
    for made in (mine, alone):
        for trace in made.traces:
            for record in trace.of(Micro):
                rows = list(record.rows) if made is mine else list(record.rows)[:4]
                one = [2.0, 2.0, 3.0 + trace.rank]  # what both ranks are given counts once
                parts = [one, [1.0, 1.0, 1.0]] if made is mine else [[4.0, 4.0, 7.0], [1.0] * 3]
                for name, value in (("parts", parts), ("rows", rows)):
                    object.__setattr__(record, name, value)
    parting = part(mine, alone, ALLOWED)
    text = meaning(parting, mine, "one process", "agrees", alone, ALLOWED)
    assert "the ranks have parts of the same samples" in text


@cases(
    "ops, line",
    (("forward", "backward", "all_reduce", "step", "all_reduce"), 3),
    (("all_reduce", "backward", "step"), None),
    (("backward", "all_reduce", "all_reduce", "step"), None),  # which of the two is not known
)
def test_the_reduction_of_a_clip(ops: tuple[str, ...], line: int | None) -> None:
    events = [
        ProgressEvent(op=op, frames=[("train.py", number, "clip")], value=None)
        for number, op in enumerate(ops, 1)
    ]
    place = reduced_after_backward(replace(trained(2), progress={0: events}))
    assert (place.line if place is not None else None) == line


@cases(
    "label, other, words",
    ("DDP", None, "computed from this rank's shards"),
    ("one process", "differs", "computed from this rank's shards"),
    ("one process", "agrees", "depends on the number of ranks"),
)
def test_why_a_learning_rate_differs(label: str, other: str | None, words: str) -> None:
    """nanotron@ea1969635a: a rate of muP by the shape of a shard."""
    mine, oracle = (trained(2, moves=({"head.weight": moved}, {}, {})) for moved in (0.05, 0.0))
    for trace in mine.traces:
        for record in trace.of(Step):
            object.__setattr__(record, "lr", [0.05])
    text = meaning(part(mine, oracle, ALLOWED), mine, label, other, oracle, ALLOWED)
    assert words in text


def coefficient(*values: float) -> list[dict[str, Any]]:
    return [
        {"main.coef": {"holder": "object", "value": value, "dtype": "float"}} for value in values
    ]


@cases(
    "mine, oracle, words",
    (
        {"states": coefficient(1, 1, 1)},
        {"states": coefficient(1, 2, 2)},
        "step 2 begins with other state than in one process: `main.coef` = 1 instead of 2",
    ),
    (
        {"between": ({}, {"head.weight": 0.1}, {})},
        {},
        "code between it and step 2 changes head.weight",
    ),
    (
        {"states": coefficient(1, 1, 1)},
        {"states": coefficient(1, 1, 1)},
        "state carried between steps",
    ),
    (
        {"states": coefficient(1, 1, 1)},
        {"states": coefficient(2, 2, 2)},
        "state carried between steps",
    ),  # from the beginning
)
def test_what_was_otherwise_before_two_runs_part(
    mine: dict[str, Any], oracle: dict[str, Any], words: str
) -> None:
    one, other = trained(2, moves=({}, {}, {"head.weight": 0.05}), **mine), trained(1, **oracle)
    assert words in meaning(part(one, other, ALLOWED), one, "one process", "agrees", other, ALLOWED)
    found = judge("matches-single-process", one, single=other)
    assert (found.status, words in found.evidence) == ("fail", True)
    assert ("Make what is named here" in (found.fix or "")) is ("carried" not in words)


def test_what_a_finding_names() -> None:
    oracles = {"reference": trained(2, 1.1), "single": trained(1, losses=(6, 4, 2))}
    found = judge("matches-single-process", trained(2, 1.1), **oracles)
    assert (found.status, found.measured is not None and found.measured > 0.05) == ("fail", True)
    assert all(part in found.evidence for part in ("one process", "1.1 x", "DDP agrees"))
    found = judge("matches-ddp", trained(2), reference=trained(2))
    assert (found.status, found.measured) == ("pass", 0.0)
    assert "from 3 to 1" in found.evidence and "5 trainable parameters" in found.evidence
    mine, same = (trained(2, {"head.weight": None}) for _ in range(2))
    found = judge("matches-ddp", mine, reference=same)
    assert (found.status, "head.weight" in found.evidence) == ("pass", True)


def test_a_reference_that_fails_is_inconclusive_and_the_other_oracle_decides() -> None:
    asks = end("TypeError", "no mesh", frames=[replace(LINE, code="model.weight.device_mesh")])
    broken = run(*[[model(), asks]] * 2, role="reference")
    assert judge("matches-ddp", trained(2), reference=broken).status == "inconclusive"
    found = judge("matches-ddp", trained(2), reference=broken, single=trained(1))
    assert found.status == "not_applicable"
    assert "TypeError: no mesh" in found.evidence and "model.weight.device_mesh" in found.evidence
    # Two ranks' losses are averaged, so one process has the same.
    assert (
        judge("matches-single-process", trained(2), reference=broken, single=trained(1)).status
        == "pass"
    )


def test_the_noise_of_one_process_is_the_measure_where_there_is_no_reference() -> None:
    noisy = trained(1, losses=(3.0, 2.0, 1.001))
    single = trained(1)
    allowed = limits(Evidence(reference=None, single=single, perturbed=noisy), "matches-ddp")
    assert allowed.allowed["loss"] == pytest.approx(
        16 * 0.001 / 3.0 + FLOOR
    )  # on the scale of the largest loss
    assert (
        limits(Evidence(reference=trained(2), single=single, perturbed=noisy), "matches-ddp")
        == allowed
    )
    assert limits(Evidence(single=single), "matches-ddp").allowed["loss"] == FLOOR


def test_a_team_may_widen_the_limits_of_one_rule() -> None:
    evidence = Evidence(single=trained(1), tolerances={"matches-ddp": Widening(2.5, "a reason")})
    assert set(limits(evidence, "matches-ddp").allowed.values()) == {
        2.5 * FLOOR,
        2.5 * CANCELLED * FLOOR,
    }
    assert limits(evidence, "matches-single-process") == limits(
        Evidence(single=trained(1)), "matches-ddp"
    )
    measured = compare(
        trained(2, at_step=1.1), trained(2)
    )  # what the optimizer finds is compared too
    change = 0.1 * math.sqrt(3 * sum(x * x for x in DIRECTION) / 4) / 2.0
    assert measured.measures["first gradient"] == 0.0
    assert measured.measures["gradient at the step"] == pytest.approx(change)
