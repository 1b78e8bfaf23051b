"""matches-full-precision: the first gradient in the script's dtype against float32 and against
rounded weights.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from records import judge, micro, model, parameter, run, step, stepped
from scripts import edited
from verified_fsdp2.verifier.analysis.precision import low_precision
from verified_fsdp2.verifier.config.policy import Widening
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.probe.dispatcher import Call
from verified_fsdp2.verifier.probe.substitutes.full_precision import _widened
from verified_fsdp2.verifier.trace import Run

SHARD = {"kind": "shard", "parameters": [], "param_dtype": "bfloat16", "reduce_dtype": "float32"}


def first_step(
    off: float = 0.0, rows: tuple[int, ...] = (1, 2), shard: dict[str, Any] = SHARD
) -> Run:
    """One rank whose first gradient is `off` (relative) away from [1, 1, 1, 1] in direction."""
    grads = {"w": [4.0 / 3.0, 1.0 + off, 1.0 - off, 1.0 + off, 1.0 - off]}
    return run([shard, model(parameter()), micro(rows=rows), step(grads=grads), stepped()])


def judged(low: Run, rounded: Run | None = None, **more: Any) -> Finding:
    runs = {
        "plain": low,
        "full_precision": first_step(),
        "rounded_weights": rounded or first_step(0.01),
    }
    return judge("matches-full-precision", low, **runs, **more)


@pytest.mark.parametrize(
    ("off", "status"), [(0.0, "pass"), (0.03, "pass"), (0.1, "fail"), (1.0, "fail")]
)
def test_the_limit_is_measured_with_rounded_weights(off: float, status: str) -> None:
    found = judged(first_step(off))
    assert found.status == status
    assert (found.measured <= found.limit) == (status == "pass")


def test_a_team_may_widen_the_limit() -> None:
    wider = judged(first_step(0.1), tolerances={"matches-full-precision": Widening(3, "a reason")})
    plain = judged(first_step(0.1))
    assert wider.limit == pytest.approx(3 * plain.limit)
    assert (plain.status, wider.status) == ("fail", "pass")


def test_noise_of_the_same_size_is_no_fault_and_other_samples_are_inconclusive() -> None:
    assert judged(first_step(0.1), rounded=first_step(0.09)).status == "pass"
    assert judged(first_step(0.1, rows=(3, 4))).status == "inconclusive"
    assert judged(first_step(float("nan"))).status == "inconclusive"
    assert (
        judge("matches-full-precision", first_step(), plain=first_step()).status == "inconclusive"
    )


def test_a_script_without_low_precision_has_nothing_to_judge() -> None:
    whole = first_step(0.5, shard={**SHARD, "param_dtype": None})
    assert judged(whole).status == "not_applicable"
    assert low_precision(whole) is None
    assert low_precision(run([{"kind": "autocast", "dtype": "float16"}])) == "float16"
    assert low_precision(first_step()) == "bfloat16"


@pytest.mark.parametrize(
    ("dtype", "held"), [(torch.bfloat16, torch.float32), (None, torch.bfloat16)]
)
def test_what_is_frozen_in_bfloat16_meets_float32_in_full_precision(
    dtype: torch.dtype | None, held: torch.dtype
) -> None:
    """LoRA on a base in bfloat16: without FSDP's cast of the adapters both must be in one type."""
    layer = torch.nn.Sequential(
        torch.nn.Linear(2, 2, dtype=torch.bfloat16), torch.nn.Linear(2, 2)
    ).requires_grad_(False)
    layer[1].requires_grad_(True)
    value = layer[0].weight.clone()
    _widened(Call((layer,), {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}))
    assert layer[0].weight.dtype == held and torch.equal(layer[0].weight, value.to(held))
    trained = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    _widened(Call(([trained],), {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}))
    assert trained.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "value", "status"),
    [
        ("bfloat16", 1.001, "pass"),
        ("bfloat16", 1.2, "inconclusive"),
        ("float32", 1.001, "inconclusive"),
    ],
)
def test_a_frozen_base_is_that_of_one_process_but_for_rounding(
    dtype: str, value: float, status: str
) -> None:
    def held(dtype: str, *values: float) -> list[dict[str, Any]]:
        return [
            SHARD,
            model(parameter(dtype=dtype, sketch=list(values))),
            micro(),
            step(),
            stepped(),
        ]

    half = held(dtype, 0.5, 0.5, 0.5, -0.5, 0.0)  # each of two ranks has one of the weights
    single = run(held("float32", 1.0, value, value, -value, 0.0), role="single")
    assert judge("rank-dependent-init-no-broadcast", half, half, single=single).status == status


@pytest.mark.full
def test_dropout_is_left_out_of_both_runs(verify_script, tmp_path: Path) -> None:
    drop = ("x = self.embed(tokens)", "x = F.dropout(self.embed(tokens), 0.3, self.training)")
    script = edited(tmp_path, drop, of="mixed_precision")
    verdict = verify_script(script, only=("matches-full-precision",))
    assert [r["role"] for r in verdict.runs] == [
        "train",
        "full_precision",
        "undropped",
        "rounded_weights",
    ]
    (found,) = verdict.findings
    assert (found.status, found.measured < 0.01) == ("pass", True), found.evidence
