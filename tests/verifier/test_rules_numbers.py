"""The rules on precision, clipping, gradients, data and optimizers that were added on records of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from records import LINE, cases, judge, micro, model, parameter, run, step, stepped
from verified_fsdp2.verifier.evidence import Sources
from verified_fsdp2.verifier.finding import Finding, Hit
from verified_fsdp2.verifier.probe.events.precision import lost_whole_numbers
from verified_fsdp2.verifier.source.lines import find_shard_use
from verified_fsdp2.verifier.source.sources import read_sources


def shard(low: str | None = "bfloat16") -> dict[str, Any]:
    return {"kind": "shard", "parameters": [], "param_dtype": low, "reduce_dtype": "float32"}


BASE = [micro(), step(), stepped()]


def sources(text: str = "") -> Sources:
    return Sources({"train.py": text}, ("train.py",))


class TestLossyCast:
    @cases(
        "values, lost",
        ([1.0, 257.0, 1001.0], (2, 257.0, 256.0)),
        ([0.0, 256.0, 512.0], None),  # bfloat16 holds these
        ([0.5, 257.3, 1000.1], None),  # no whole numbers: an activation
        ([0.0, -10000.0], None),  # an additive mask
        ([0.0, float("inf")], None),
        ([3.0e38, 0.0], None),  # beyond what float32 counts
    )
    def test_whole_numbers_only(self, values: list[float], lost: tuple[int, float, float] | None) -> None:
        assert lost_whole_numbers(torch.tensor(values), torch.bfloat16) == lost

    def test_other_tensors_are_left_alone(self) -> None:
        positions = torch.arange(2000, dtype=torch.float32)
        for other in (positions.long(), positions.requires_grad_(), torch.empty(0)):
            assert lost_whole_numbers(other, torch.bfloat16) is None
        assert lost_whole_numbers(torch.tensor([257.0]), torch.float16) is None
        assert lost_whole_numbers(torch.tensor([2049.0]), torch.float16) == (1, 2049.0, 2048.0)

    def test_the_rule(self) -> None:
        lost = {"kind": "lossy_cast", "cls": "Block", "shape": [4], "dtype": "bfloat16"}
        lost |= {"changed": 2, "was": 257.0, "now": 256.0}
        found = judge("cast-forward-inputs-lossy", [shard(), model(), lost, *BASE])
        assert (found.status, "257 becomes 256" in found.evidence) == ("fail", True)

    @pytest.mark.parametrize(("factor", "status"), [(1024.0, "pass"), (1000.0, "fail"), (2.0, "fail")])
    def test_a_loss_that_the_script_scales_itself(self, factor: float, status: str) -> None:
        scaled = step(grads={"w": [factor**2, factor, 0.0, 0.0, 0.0]}, grads_at_step={"w": [1.0, 1.0, 0.0, 0.0, 0.0]})
        assert judge("fp16-without-scaler", [shard("float16"), model(), micro(), scaled, stepped()]).status == status


def test_a_partial_number_that_is_read() -> None:
    read = {"kind": "partial_read", "op": "item", "placements": ["_NormP(2)"]}
    found = judge("grad-norm-item-partial", [model(), *BASE], [model(), *BASE, read, read])
    assert (found.status, found.location) == ("fail", LINE)
    assert "`.item()`" in found.evidence and "_NormP(2)" in found.evidence
    assert judge("grad-norm-item-partial", [model(), *BASE]).status == "pass"
    assert judge("grad-norm-item-partial", [model(parameter(sharded=False)), *BASE]).status == "not_applicable"


LEFT = {"kind": "zeroed", "step": 2, "unsynced": ["w"]}
STEP_2 = [micro(2), step(2), stepped(2)]


def test_what_is_left_and_stepped_on_fails() -> None:
    found = judge("unsynced-grads-survive-zero-grad", [model(), *BASE, LEFT, *STEP_2])
    assert (found.status, "w" in found.evidence) == ("fail", True)


def begin(epoch: int = 0, **more: Any) -> dict[str, Any]:
    base = {"kind": "sampler", "cls": "S", "dataset": 0, "epoch": epoch, "shuffle": True, "seed": 0, "samples": 8}
    return {**base, **more}


def between(*records: dict[str, Any]) -> list[dict[str, Any]]:
    """What a rank records whose sampler begins, and `records` after its second batch."""
    return [model(), begin(), *BASE, micro(2), *records, micro(3)]


LOSSY, FP16, LEFT_RULE = "cast-forward-inputs-lossy", "fp16-without-scaler", "unsynced-grads-survive-zero-grad"
SCALER = {"kind": "scaler", "cls": "torch.amp.grad_scaler.GradScaler"}
UNSYNCED = [model(), micro(), step(unsynced=["w"]), stepped(), LEFT, *STEP_2]
NO_EPOCH = {"hits": {"set-epoch-missing": (Hit("set-epoch-missing", "no set_epoch in the loop", LINE),)}}


@cases(
    "rule, rank, status",
    (LOSSY, [shard(), model(), *BASE], "pass"),
    (LOSSY, [shard(None), model(), *BASE], "not_applicable"),
    (LOSSY, [shard(None), *BASE], "inconclusive"),
    (FP16, [shard("float16"), model(), *BASE], "fail"),
    (FP16, [shard("float16"), model(), SCALER, *BASE], "pass"),
    (FP16, [shard("bfloat16"), model(), *BASE], "not_applicable"),
    (LEFT_RULE, [model(), *BASE, LEFT], "pass"),  # left at the end
    (LEFT_RULE, [model(), LEFT, {"kind": "discarded"}, *BASE], "pass"),
    (LEFT_RULE, UNSYNCED, "pass"),  # what a step had not reduced is another fault
    ("accum-never-resynced", UNSYNCED, "fail"),
    *((rule, [model(), *BASE], "not_applicable") for rule in (LEFT_RULE, "accum-never-resynced")),
    *((rule, [model(), {"kind": "sync"}, *BASE], "pass") for rule in (LEFT_RULE, "accum-never-resynced")),
    ("set-epoch-missing", between(begin()), "fail"),  # the same order twice
    ("set-epoch-missing", between(begin(1)), "pass"),
    ("set-epoch-missing", between(begin(dataset=1)), "pass"),
    ("set-epoch-missing", [model(), begin(), begin(), *BASE, micro(2), micro(3)], "pass"),  # a look at the first batch
    ("set-epoch-missing", between(begin(0), begin(1)), "pass"),  # an evaluation over the training data
    ("set-epoch-missing", between(begin(shuffle=False)), "inconclusive"),
    ("set-epoch-missing", between(), "inconclusive"),  # one epoch
)
def test_the_status(rule: str, rank: list[dict[str, Any]], status: str) -> None:
    assert judge(rule, rank).status == status


def test_one_epoch_is_left_to_the_sources() -> None:
    assert judge("set-epoch-missing", between(), **NO_EPOCH).status == "fail"


def test_gradients_that_zero_grad_of_the_model_did_not_reach() -> None:
    left = {"kind": "not_cleared", "names": ["head.weight"]}
    found = judge("zero-grad-while-unsharded", [model(), *BASE, left, micro(2), step(2), stepped(2)])
    assert (found.status, "head.weight" in found.evidence) == ("fail", True)
    assert judge("zero-grad-while-unsharded", [model(), *BASE, left]).status == "pass"
    without = sources("optimizer.step()")
    assert judge("zero-grad-while-unsharded", [model(), *BASE], sources=without).status == "not_applicable"
    assert judge("zero-grad-while-unsharded", [model(), *BASE], sources=sources("net.zero_grad()")).status == "pass"


def test_recomputed_dropout() -> None:
    def judged(*seen: bool) -> str:
        records = [{"kind": "recompute", "same": same, "place": "model.py"} for same in seen]
        return judge("recompute-draws-anew", [model(), *records, *BASE]).status

    assert (judged(), judged(True), judged(True, False)) == ("not_applicable", "pass", "fail")


def test_reduction_in_low_precision() -> None:
    def judged(*records: dict[str, Any]) -> str:
        return judge("reduce-dtype-follows-param-dtype", list(records)).status

    follows = {**shard(), "reduce_dtype": None}
    assert (judged(follows), judged(follows, model(), *BASE)) == ("fail", "fail")
    assert (judged(shard()), judged(shard(), model(), *BASE)) == ("inconclusive", "pass")
    assert judged({**shard(None), "reduce_dtype": None}, model(), *BASE) == "not_applicable"


class TestMasterWeights:
    def judge(self, dtype: str, **more: Any) -> str:
        rank = [shard(), model(parameter(dtype=dtype)), micro(), step(**more), stepped()]
        return judge("bf16-master-weights", rank).status

    def test_low_ones_fail_unless_the_optimizer_may_keep_its_own(self) -> None:
        assert (self.judge("float32"), self.judge("bfloat16")) == ("pass", "fail")
        assert self.judge("bfloat16", cls="torchao.optim.AdamW8bit") == "inconclusive"

    def test_an_optimizer_of_no_parameter_that_was_seen_is_inconclusive(self) -> None:
        for rule in ("bf16-master-weights", "optim-before-shard", "optim-built-after-forward"):
            assert judge(rule, [shard(), model(), micro(), step(held=[]), stepped()]).status == "inconclusive"


class TestErrorsOfTorch:
    """Rules on errors that torch raises, of a run that none has stopped."""

    def judge(self, rule: str, *records: dict[str, Any], text: str = "", ranks: int = 2, **more: Any) -> str:
        rank = [*(records or [shard(None)]), model(), *BASE]
        return judge(rule, *[rank] * ranks, sources=sources(text), **more).status

    @cases(
        "rule, there",
        ("gloo-premul-sum", [shard(None), {"kind": "divide", "factor": 1.0}]),
        ("buffers-and-odd-inputs-not-cast", [shard()]),
        ("output-dtype-on-inner-blocks", [{**shard(), "output_dtype": "float32"}]),
        ("meta-not-materialized", [shard(None), {"kind": "to_empty"}]),
    )
    def test_what_the_run_shows(self, rule: str, there: list[dict[str, Any]]) -> None:
        whole = {**shard(None), "parameters": [{"name": "w"}]}
        assert (self.judge(rule, whole), self.judge(rule, *there)) == ("not_applicable", "pass")

    def test_what_the_sources_show(self) -> None:
        assert self.judge("full-sd-into-dtensor") == "not_applicable"
        assert self.judge("full-sd-into-dtensor", text="model.load_state_dict(x)") == "pass"
        assert self.judge("full-sd-into-dtensor", text="model.load_state_dict(x)", saving=LINE) == "inconclusive"
        loaded = {"kind": "checkpoint", "op": "torch.load", "after_step": 0, "to": ""}
        assert self.judge("full-sd-into-dtensor", shard(None), loaded, saving=LINE) == "pass"

    def test_no_sync(self) -> None:
        assert self.judge("no-sync-idiom") == "not_applicable"
        assert self.judge("no-sync-idiom", text="with model.no_sync():") == "inconclusive"
        assert self.judge("no-sync-idiom", shard(None), micro(), text="with model.no_sync():") == "pass"

    def test_a_factor_on_one_rank_reduces_nothing(self) -> None:
        assert self.judge("gloo-premul-sum", {"kind": "divide", "factor": 1.0}, ranks=1) == "inconclusive"

    def test_clips_over_several_meshes(self) -> None:
        one, two = parameter("w"), parameter("v", mesh=[1, 2])
        clip = {"kind": "clips"}

        def judged(*records: dict[str, Any]) -> str:
            return judge("clip-mixed-mesh", [*records, *BASE], sources=sources()).status

        assert judged(model(one), clip) == "not_applicable"
        assert judged(model(one, two)) == "not_applicable"
        assert judged(model(one, two), clip) == "pass"

    @pytest.mark.parametrize("rule", ["lowbit-or-unsupported-optimizer", "mixed-orig-dtype-in-group"])
    def test_what_every_sharded_model_shows(self, rule: str) -> None:
        assert self.judge(rule) == "pass"
        assert judge(rule, [model(), *BASE]).status == "inconclusive"

    def test_a_run_without_steps_is_inconclusive(self) -> None:
        names = ["gloo-premul-sum", "output-dtype-on-inner-blocks", "full-sd-into-dtensor", "no-sync-idiom"]
        names += ["buffers-and-odd-inputs-not-cast", "meta-not-materialized", "clip-mixed-mesh"]
        assert {judge(name, [shard(None), model()], sources=sources()).status for name in names} == {"inconclusive"}


class TestToEmpty:
    EMPTY: ClassVar[dict[str, Any]] = {"kind": "to_empty"}
    BUFFER: ClassVar[dict[str, Any]] = {"name": "rope", "shape": [4], "unset": 0}

    def judge(self, rule: str, *records: dict[str, Any], unset: int | None = 0) -> str:
        filled = model(parameter(unset=unset), buffers=[{**self.BUFFER, "unset": unset}])
        provoked = run([self.EMPTY, filled], role="provoked") if unset is not None else None
        return judge(rule, [*records, *BASE], provoked=provoked).status

    @pytest.mark.parametrize("rule", ["meta-buffers-garbage", "meta-params-not-reset"])
    def test_uninitialised_memory(self, rule: str) -> None:
        whole = model(buffers=[self.BUFFER])
        assert self.judge(rule, whole) == "not_applicable"
        assert self.judge(rule, self.EMPTY, whole) == "pass"
        assert self.judge(rule, self.EMPTY, whole, unset=3) == "fail"
        assert self.judge(rule, self.EMPTY, whole, unset=None) == "inconclusive"

    def test_a_model_without_buffers(self) -> None:
        assert self.judge("meta-buffers-garbage", self.EMPTY, model()) == "not_applicable"


class TestMatrixOptimizer:
    """A class of the script's own that works on shards, against one process."""

    def judge(self, update: float = 0.0, grads: float = 1.0, cls: str = "Muon", shards: bool = True) -> Finding:
        def rank(copy: int, rows: tuple[int, ...], grads: float = 1.0, update: float = 0.0) -> list[dict[str, Any]]:
            optimizer = {"kind": "optimizer", "cls": cls, "number": 0}
            asked = [{"kind": "shard_in_step"}] if shards else []
            size = {"w": [grads**2, grads, 0.0, 0.0, 0.0]}
            after = {"w": [1.0, 0.9 - update, 0.0, 0.0, 0.0]}
            whole = model(parameter("w", copy))
            return [optimizer, whole, micro(rows=rows), step(grads=size), *asked, stepped(weights=after)]

        mine = run(rank(0, (1,), grads, update), rank(1, (2,), grads, update))
        return judge("matrix-optimizer-on-local-shard", mine, single=run(rank(0, (1, 2))))

    def test_another_update_from_equal_gradients_fails(self) -> None:
        found = self.judge(update=0.05, cls="__main__.Muon")
        assert (found.status, found.location, found.measured) == ("fail", LINE, pytest.approx(0.5))
        assert "Muon" in found.evidence

    @cases(
        "more, status",
        ({}, "pass"),
        ({"update": 0.05, "grads": 2.0}, "inconclusive"),  # other gradients are another fault
        ({"update": 0.05, "cls": "torch.optim.adamw.AdamW"}, "not_applicable"),
        ({"update": 0.05, "shards": False}, "pass"),
    )
    def test_its_status(self, more: dict[str, Any], status: str) -> None:
        assert self.judge(**more).status == status


def test_the_line_that_takes_a_shard_is_one_of_the_optimizer_s_class_if_it_has_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "def clip(p):\n    return p.to_local()\n\nclass Muon:\n    def step(self, p):\n        return p._local_tensor\n"
    )
    found = [find_shard_use(read_sources((script,), ()), name) for name in ("Muon", "Other")]
    assert [place.line for place in found if place is not None] == [6, 2]
    script.write_text("def clip(p):\n    return p.full_tensor()\n")
    assert find_shard_use(read_sources((script,), ()), "Muon") is None


@pytest.mark.parametrize(("loss", "status"), [(0.0, "pass"), (1e-3, "fail")])
def test_losses_that_came_down_to_zero_are_compared_after_resharding(loss: float, status: str) -> None:
    save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "", "keys": []}
    first, then = [model(), micro(1), step(1), stepped(1), save], [micro(2, loss=0.0), step(2), stepped(2)]
    resharded = run([model(), micro(1, loss=loss), step(1), stepped(1)], role="reshard")
    whole = run([*first, *then])
    again = run([*first, *then], role="perturbed")
    more = {"resume_full_precision": whole, "reshards": (resharded,), "reference": whole, "perturbed": again}
    assert judge("reshard-keeps-trajectory", whole, **more).status == status
