"""Where two runs part and what that means, on manual records: one pattern of disagreement each."""

import math
from typing import Any

import pytest

from records import micro, model, parameter, run, step, stepped, trace
from verified_fsdp2.verifier.analysis.comparison import FLOOR, MEASURES, compare, limits
from verified_fsdp2.verifier.analysis.factors import DIVIDED_TWICE, NOT_DIVIDED, readings
from verified_fsdp2.verifier.analysis.localise import meaning, part, where
from verified_fsdp2.verifier.config.policy import Widening
from verified_fsdp2.verifier.evidence import Evidence
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judge import judge_one
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.trace import Run

NAMES = ("embed.weight", "blocks.0.up.weight", "blocks.1.up.weight", "blocks.1.down.weight", "head.weight")
ALLOWED = dict.fromkeys(MEASURES, FLOOR)
DIRECTION = (1.0, -2.0, 0.5, 3.0)


def gradients(**factors: float) -> dict[str, Any]:
    """The same direction for every parameter, times a factor of its own (`all` for the rest)."""
    scale = {name: factors.get(name, factors.get("all", 1.0)) for name in NAMES}
    return {name: [k * k * 4.0, *(k * x for x in DIRECTION)] for name, k in scale.items()}


def trained(
    ranks: int = 1,
    grads: dict[str, Any] | None = None,
    at_step: dict[str, Any] | None = None,
    moves: tuple[dict[str, float], ...] = ({}, {}, {}),
    losses: tuple[float, ...] = (3.0, 2.0, 1.0),
    micros: int = 1,
    samples: tuple[int, ...] = (1, 2, 3, 4),
) -> Run:
    """A run of three steps; `moves[k]` are extra lengths of weights after step k+1, by parameter."""
    grads = grads or gradients()
    own = [samples[r::ranks] for r in range(ranks)]
    records: list[list[dict[str, Any]]] = []
    for rank in range(ranks):
        rows: list[dict[str, Any]] = [model(*(parameter(name, copy=rank) for name in NAMES))]
        for k in range(3):
            rows += [micro(k + 1, losses[k], own[rank])] + [micro(k + 1, 0.0)] * (micros - 1)
            start = {name: [1.0, *(x * (1.0 - 0.1 * k) for x in DIRECTION)] for name in NAMES}
            after = {name: [1.0, *(x * (0.9 - 0.1 * k + moves[k].get(name, 0.0)) for x in DIRECTION)] for name in NAMES}
            moved = {name: [0.01, -0.1, 8.0] for name in NAMES}
            rows += [
                step(k + 1, grads, grads_at_step=at_step or grads, weights=start),
                stepped(k + 1, weights=after, moved=moved),
            ]
        records.append(rows)
    return run(*records)


def said(mine: Run, oracle: Run, label: str = "DDP", other: str | None = None) -> str:
    parting = part(mine, oracle, ALLOWED)
    return f"{where(parting)}; {meaning(parting, mine, label, other)}"


@pytest.mark.parametrize(
    ("factor", "causes"),
    [(2.0, {"ranks"}), (0.5, {"ranks"}), (3.0, {NOT_DIVIDED}), (1 / 3, {DIVIDED_TWICE}), (6.0, {"both"}), (1.1, set())],
)
def test_a_factor_on_every_gradient(factor: float, causes: set[str]) -> None:
    mine, oracle = trained(2, gradients(all=factor), micros=3), trained(2)
    parting = part(mine, oracle, ALLOWED)
    assert (parting.stage, parting.factor, parting.parameters) == ("gradient", pytest.approx(factor), NAMES)
    assert {reading.cause for reading in readings(factor, mine)} == causes
    assert f"{factor:.4g} x" in said(mine, oracle)


def test_a_factor_on_one_module_and_factors_that_differ() -> None:
    mine = trained(2, gradients(**{"blocks.1.up.weight": 2.0, "blocks.1.down.weight": 2.0}))
    parting = part(mine, trained(2), ALLOWED)
    assert (parting.stage, parting.module, parting.factor) == ("gradient", "blocks.1", 2.0)
    assert parting.parameters == ("blocks.1.up.weight", "blocks.1.down.weight")
    assert all(
        text in where(parting) for text in ("2 of 5 parameters", "all under blocks.1", "first blocks.1.up.weight")
    )
    parting = part(trained(2, gradients(**{"embed.weight": 2.0, "head.weight": 3.0})), trained(2), ALLOWED)
    assert (parting.factor, parting.parameters, parting.module) == (None, ("embed.weight", "head.weight"), "")


STAGES: list[tuple[dict[str, Any], str, int, float | None]] = [
    ({"at_step": gradients(all=0.5)}, "clip", 1, 0.5),
    ({"moves": ({"head.weight": 0.05}, {}, {})}, "optimizer", 1, None),
    ({"moves": ({}, {"head.weight": 0.05}, {})}, "later", 2, None),
    ({"losses": (3.0, 2.0, 1.5)}, "later", 3, None),
    ({"losses": (6.0, 4.0, 2.0)}, "loss", 1, None),
]


@pytest.mark.parametrize(("changed", "stage", "step", "factor"), STAGES)
def test_the_first_stage_that_differs(changed: dict[str, Any], stage: str, step: int, factor: float | None) -> None:
    parting = part(trained(2, **changed), trained(2), ALLOWED)
    assert (parting.stage, parting.step, parting.factor) == (stage, step, factor)
    if "moves" in changed:
        assert (parting.module, parting.parameters) == ("head", ("head.weight",))


def test_every_stage_and_the_other_oracle_have_a_message_of_their_own() -> None:
    assert len({said(trained(2, **changed), trained(2)) for changed, *_ in STAGES}) == len(STAGES)
    mine, oracle = trained(2, gradients(all=1.1)), trained(1)
    assert len({said(mine, oracle, "one process", other) for other in ("agrees", "differs", None)}) == 3
    assert len({said(mine, trained(2), "DDP", other) for other in ("differs", None)}) == 2


class TestRules:
    def judge(self, rule: str, mine: Run, reference: Run | None, single: Run | None, **more: Any) -> Finding:
        evidence = Evidence(train=mine, full_precision=mine, reference=reference, single=single, **more)
        return judge_one(RULES[rule], evidence)

    def test_what_a_finding_names(self) -> None:
        mine = trained(2, gradients(all=1.1))
        found = self.judge("matches-single-process", mine, trained(2, gradients(all=1.1)), trained(1, losses=(6, 4, 2)))
        assert (found.status, found.measured is not None and found.measured > 0.05) == ("fail", True)
        assert all(part in found.evidence for part in ("one process", "1.1 x", "DDP agrees"))
        found = self.judge("matches-ddp", trained(2), trained(2), None)
        assert (found.status, found.measured) == ("pass", 0.0)
        assert "from 3 to 1" in found.evidence and "5 trainable parameters" in found.evidence
        grads = {**gradients(), "head.weight": None}
        found = self.judge("matches-ddp", trained(2, grads), trained(2, grads), None)
        assert (found.status, "head.weight" in found.evidence) == ("pass", True)

    def test_a_reference_that_fails_is_inconclusive_and_the_other_oracle_decides(self) -> None:
        broken = run([model()], [model()], role="reference")
        end = {"kind": "end", "how": "exception", "error": "TypeError", "message": "no mesh"}
        frame = {"file": "train.py", "line": 7, "function": "main", "code": "model.weight.device_mesh"}
        for one in broken.traces:
            made = trace(one.rank, (*one.records[:-1], {**end, "seq": 9, "at": 9.0, "frames": [frame]}))
            object.__setattr__(one, "records", made.records)
        mine = trained(2)
        found = self.judge("matches-ddp", mine, broken, trained(1, losses=(6, 4, 2)))
        assert found.status == "inconclusive"
        assert "TypeError: no mesh" in found.evidence and "model.weight.device_mesh" in found.evidence
        # Two ranks' losses are averaged, so one process has the same.
        assert self.judge("matches-single-process", mine, broken, trained(1)).status == "pass"


def test_the_noise_of_one_process_is_the_measure_where_there_is_no_reference() -> None:
    noisy = trained(1, losses=(3.0, 2.0, 1.001))
    single = trained(1)
    allowed = limits(Evidence(reference=None, single=single, perturbed=noisy), "matches-ddp")
    assert allowed.allowed["loss"] == pytest.approx(16 * 0.001 / 3.0 + FLOOR)  # on the scale of the largest loss
    assert limits(Evidence(reference=trained(2), single=single, perturbed=noisy), "matches-ddp") == allowed
    assert limits(Evidence(single=single), "matches-ddp").allowed["loss"] == FLOOR


def test_a_team_may_widen_the_limits_of_one_rule() -> None:
    evidence = Evidence(single=trained(1), tolerances={"matches-ddp": Widening(2.5, "a reason")})
    assert set(limits(evidence, "matches-ddp").allowed.values()) == {2.5 * FLOOR}
    assert limits(evidence, "matches-single-process") == limits(Evidence(single=trained(1)), "matches-ddp")
    measured = compare(trained(2, at_step=gradients(all=1.1)), trained(2))  # what the optimizer finds is compared too
    assert measured.measures["first gradient"] == 0.0
    assert measured.measures["gradient at the step"] == pytest.approx(
        0.1 * math.sqrt(3 * sum(x * x for x in DIRECTION) / 4) / 2.0
    )
