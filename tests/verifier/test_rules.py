"""The judgement of single rules on manual records: the borderline cases, in milliseconds."""

from typing import Any

import pytest

from records import cases, entropy, judge, micro, model, parameter, run, step, stepped, wrap
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judge import judge_one
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.rules.base import SECTIONS


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_without_evidence_is_inconclusive_and_its_docs_are_complete(rule: str) -> None:
    found = judge_one(RULES[rule], Evidence())
    status = "not_applicable" if rule == "unused-suppression" else "inconclusive"  # no comment is known
    assert (found.status, found.rule) == (status, rule)
    assert found.evidence
    page = RULES[rule].page()
    assert all(page[section] for section in ("Statement", *SECTIONS))


class TestTokenMeanOfMeans:
    @cases(
        "losses, values, reduction, measured",
        ((2.0, 3.0), (2.0, 3.0), "mean", 8.0),  # equal weights on unequal counts
        ((0.4, 5.4), (2.0, 3.0), "mean", None),  # weights in proportion
        ((20 / 50, 270 / 50), (20.0, 270.0), "sum", None),  # sums divided by the global count
    )
    def test_unequal_counts(self, losses: Any, values: Any, reduction: str, measured: float | None) -> None:
        counts = (10, 90)
        ranks = [
            [model(), micro(loss=losses[k], criteria=entropy(counts[k], values[k], reduction)), step(), stepped()]
            for k in range(2)
        ]
        found = judge("token-mean-of-means", *ranks)
        assert found.status == ("pass" if measured is None else "fail")
        assert measured is None or found.measured == pytest.approx(measured)

    def test_equal_counts_show_nothing(self) -> None:
        rank = [model(), micro(loss=2.0, criteria=entropy(10, 2.0)), step(), stepped()]
        assert judge("token-mean-of-means", rank, rank).status == "not_applicable"

    def test_another_loss_is_judged_by_one_process(self) -> None:
        rank = [model(), micro(rows=(1, 2)), step(), stepped()]
        assert judge("token-mean-of-means", rank, rank).status == "inconclusive"
        single = run([model(), micro(rows=(1, 2, 1, 2)), step(), stepped()])
        assert judge("token-mean-of-means", rank, rank, single=single).status == "not_applicable"


class TestWorldScale:
    @pytest.mark.parametrize(("loss", "status"), [(2.0, "pass"), (1.0, "fail"), (4.0, "fail"), (3.0, "pass")])
    def test_what_losses_add_up_to(self, loss: float, status: str) -> None:
        """Factors of 1/2 and 2 at two ranks are faults; one of 1.5 is a weight of the script's own."""
        rank = [model(), micro(loss=loss, criteria=entropy(10, 2.0)), step(), stepped()]
        assert judge("double-or-missing-world-scale", rank, rank).status == status

    def test_a_divide_factor_of_the_script_counts(self) -> None:
        divide = {"kind": "divide", "factor": 1.0}
        rank = [model(), divide, micro(loss=1.0, criteria=entropy(10, 2.0)), step(), stepped()]
        assert judge("double-or-missing-world-scale", rank, rank).status == "pass"

    @pytest.mark.parametrize(("scale", "status"), [(1.0, "pass"), (2.0, "fail"), (0.5, "fail"), (1.5, "pass")])
    def test_one_parameter_off_by_the_world_size(self, scale: float, status: str) -> None:
        def rank(scale: float, copy: int) -> list[dict[str, Any]]:
            grads = {"a": [1.0, 1.0, 2.0, 3.0, 4.0], "b": [scale * x for x in (scale, 1.0, 2.0, 3.0, 4.0)]}
            return [model(parameter("a", copy), parameter("b", copy)), micro(rows=(1,)), step(grads=grads), stepped()]

        single = run([model(), micro(rows=(1, 1)), *rank(1.0, 0)[2:]])
        assert judge("double-or-missing-world-scale", rank(scale, 0), rank(scale, 1), single=single).status == status


class TestClip:
    @staticmethod
    def stress(scale: float, collinear: bool = True) -> dict[str, Any]:
        bb, ss = 4.0, 4.0 * scale**2
        bs = 4.0 * scale if collinear else 2.0 * scale
        return {"kind": "stress", "factor": 1e6, "products": {"w": [bb, bs, ss]}}

    def ranks(self, *records: dict[str, Any]) -> list[list[dict[str, Any]]]:
        return [[model(), micro(), step(), stepped(), record] for record in records]

    def judge(self, *ranks: list[dict[str, Any]]) -> Finding:
        quiet = [[record for record in rank if record["kind"] != "stress"] for rank in ranks]
        return judge("manual-local-norm-clip", *quiet, provoked=run(*ranks, role="provoked"))

    def test_a_run_that_stops_before_its_step_is_inconclusive(self) -> None:
        quiet = [[model(), micro(), step(), stepped()]] * 2
        clips = Sources({"train.py": "def clip(p):\n    p.grad.div_(p.grad.norm())\n"}, ("train.py",))
        more = {"provoked": run(*quiet), "gradients": True}
        assert judge("manual-local-norm-clip", *quiet, **more, sources=clips).status == "inconclusive"
        assert judge("manual-local-norm-clip", *quiet, **more).status == "not_applicable", "nothing may clip"
        filled = judge("manual-local-norm-clip", *quiet, provoked=run(*quiet))
        assert filled.status == "not_applicable", "the run was made for uninitialised memory"
        assert judge("manual-local-norm-clip", *quiet).status == "not_applicable", "nothing touches gradients"

    @cases(
        "scales, collinear, status",
        ((1e-6, 1e-6), True, "pass"),
        ((1e-6, 1.1e-6), True, "fail"),
        ((1.0, 1.0), True, "not_applicable"),  # no clipping
        ((1e-6, 3e-6), False, "not_applicable"),  # by value, not by norm
        ((1e-6,), True, "inconclusive"),  # one rank cannot show it
    )
    def test_factors(self, scales: tuple[float, ...], collinear: bool, status: str) -> None:
        assert self.judge(*self.ranks(*(self.stress(scale, collinear) for scale in scales))).status == status


@cases("other, status", (1.0, "pass"), (2.0, "fail"))
def test_gradients_of_a_plain_parameter(other: float, status: str) -> None:
    whole = [{"kind": "shard", "parameters": []}, model(parameter(), parameter("head", managed=False, sharded=False))]
    ranks = [[*whole, micro(), step(grads={"head": [first, 1, 0, 0, 0]}), stepped()] for first in (1.0, other)]
    found = judge("root-not-wrapped", *ranks)
    assert (found.status, "head" in found.evidence or status == "pass") == (status, True)


class TestSameData:
    @cases(
        "rows, status",
        (((1, 2), (1, 2)), "fail"),
        (((1, 2), (2, 1)), "fail"),
        (((1, 2), (1, 3)), "pass"),
        (((), ()), "inconclusive"),
    )
    def test_rows(self, rows: tuple[tuple[int, ...], ...], status: str) -> None:
        ranks = [[model(), micro(rows=own), step(), stepped()] for own in rows]
        assert judge("same-data-on-every-rank", *ranks).status == status

    @cases("state, status", ("r", "pass"), ("other", "fail"))
    def test_the_same_inputs_with_other_targets(self, state: str, status: str) -> None:
        """A graph is given to all ranks, and each takes its own nodes: equal generators, other losses."""
        ranks = [
            [model(), micro(loss=k, rows=(1, 2), random=r), step(), stepped()] for k, r in ((1.0, "r"), (2.0, state))
        ]
        assert judge("same-data-on-every-rank", *ranks).status == status

    def test_ranks_of_one_tensor_parallel_group_may_share(self) -> None:
        """The mesh that fully_shard is given is the data-parallel one; ranks outside are not compared."""
        data = wrap([0, 2])
        ranks = [[data, model(), micro(rows=own), step(), stepped()] for own in ((1,), (1,), (2,), (2,))]
        assert judge("same-data-on-every-rank", *ranks).status == "pass"


class TestResume:
    def pair(self, **resumed: Any) -> Evidence:
        save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "", "keys": []}
        state = {"state": {"w": {"exp_avg": [1.0] * 5, "step": 1.0}}}
        train = [model(), micro(1, rows=(1,)), step(1), stepped(1), save]
        train += [micro(2, rows=(2,)), step(2, **state), stepped(2)]
        rows = {"rows": resumed.pop("rows", (2,))}
        again = [model(), micro(1, **rows), step(1, **{**state, **resumed}), stepped(1)]
        return Evidence(train=run(train), full_precision=run(train), resume=run(again, role="resume"))

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
