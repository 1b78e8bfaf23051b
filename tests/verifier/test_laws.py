"""The laws on recorded traces: a breach each, and what a right script does that looks like one."""

from __future__ import annotations

from typing import Any

import pytest

from records import cases, entropy, micro, run, step, stepped
from verified_fsdp2.verifier.analysis.state import evaluated
from verified_fsdp2.verifier.config.watch import watched
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judge import judge_one
from verified_fsdp2.verifier.rules import RULES

SAVE = {"kind": "checkpoint", "op": "save", "after_step": 2, "to": "/x"}
LOOP = """
def main():
    best, seen = 9.0, 0
    for step in range(9):
        seen += 1
        if value < best:
            best = value
        if seen % 2 == 0:
            print(seen)
        if step % 2:
            value = evaluate(model)
            if value < 9.0:
                kept = model.state_dict()
    export(kept)


@torch.no_grad()
def evaluate(model):
    return loss_of(model)


def train_step(model):
    with torch.no_grad():
        target = teacher(batch)
    loss = loss_of(model, target)
    loss.backward()
    return loss.item()
"""
SOURCES = Sources({"train.py": LOOP}, ("train.py",))


def held(value: float | None = None, holder: str = "local", **more: Any) -> dict[str, Any]:
    return {"holder": holder, "value": value, "dtype": "float", **more}


def tensor(size: float, holder: str = "local", **more: Any) -> dict[str, Any]:
    return held(None, holder, sketch=[size * size, size, 0.0, 0.0, 0.0], numel=64, dtype="float32", **more)


def state(number: int, evaluations: int = 0, in_eval: tuple[str, ...] = (), **values: Any) -> dict[str, Any]:
    paths = {name.replace("__", "."): value for name, value in values.items()}
    return {"kind": "state", "step": number, "values": paths, "evaluations": evaluations, "in_eval": list(in_eval)}


def steps(number: int = 3, **more: Any) -> list[dict[str, Any]]:
    return [one for k in range(1, number + 1) for one in (micro(k, rows=(k,)), step(k, **more), stepped(k))]


def judge(name: str, evidence: Evidence) -> Finding:
    return judge_one(RULES[name], evidence)


def of(*ranks: list[dict[str, Any]], **more: Any) -> Evidence:
    made = run(*ranks)
    return Evidence(train=made, full_precision=made, sources=SOURCES, **more)


class TestGradients:
    rule = "gradients-consumed-once"

    def test_gradients_that_were_used_are_used_again(self) -> None:
        kept = {"kind": "kept_gradients", "step": 2, "names": ["w"]}
        found = judge(self.rule, of([*steps(), kept], [*steps(), kept]))
        assert (found.status, found.location is not None) == ("fail", True)

    def test_those_of_another_optimizer_may_wait(self) -> None:
        kept = {"kind": "kept_gradients", "step": 2, "names": ["v"]}
        assert judge(self.rule, of([*steps(), kept], steps())).status == "pass"

    def test_a_clip_between_micro_batches(self) -> None:
        edit = {"kind": "edited_gradients", "step": 1, "micro": 2, "factors": {"w": 0.25, "v": 0.25}}
        assert judge(self.rule, of([*steps(), edit], steps())).status == "fail"
        surgery = {**edit, "factors": {"w": 0.25, "v": None}}
        assert judge(self.rule, of([*steps(), surgery], steps())).status == "pass"

    @pytest.mark.parametrize(("again", "status"), [(2, "fail"), (1, "pass")])
    def test_gradients_are_cleared_between_micro_batches(self, again: int, status: str) -> None:
        """The same samples come again in SAM, whose first gradients only show the way."""
        records = []
        for k in range(1, 4):
            edit = {"kind": "edited_gradients", "step": k, "micro": 2, "factors": {"w": 0.0}}
            records += [micro(k, rows=(1,)), edit, micro(k, rows=(again,)), step(k), stepped(k)]
        assert judge(self.rule, of(records, records)).status == status

    def test_a_dry_run_may_throw_gradients_away(self) -> None:
        dry = [micro(1, rows=(9,)), {"kind": "cleared", "step": 1}]
        assert judge(self.rule, of([*dry, *steps()], [*dry, *steps()])).status == "pass"

    def test_a_step_without_backward(self) -> None:
        twice = [micro(1), step(1), stepped(1), step(2), stepped(2)]
        assert judge(self.rule, of(twice, twice)).status == "fail"
        zero = {"w": [0.0, 0.0, 0.0, 0.0, 0.0]}
        idle = [micro(1), step(1), stepped(1), step(2, zero), stepped(2)]
        assert judge(self.rule, of(idle, idle)).status == "pass"


class TestRestored:
    rule = "state-restored"

    def both(self, then: dict[str, Any], now: dict[str, Any]) -> Evidence:
        train = [*steps(4)[:6], SAVE, *steps(4)[6:]]
        first = {
            path: {**value, "value": -1.0} if value["value"] is not None else tensor(9.0)
            for path, value in then.items()
        }
        train = [state(1, **first), *train, state(3, **then)]
        resumed = run(*[[micro(1, rows=(3,)), step(1), stepped(1), state(1, **now)]] * 2, role="resume")
        return of(train, train, resume=resumed)

    @cases("name, then, now",
        ("ema", tensor(1.0), tensor(0.5)),
        ("main__best", held(0.5), held(9.0)),
        ("main__scheduler__last_epoch", held(2.0, "scheduler"), held(0.0, "scheduler")),
        ("model__running_mean", tensor(1.0, "module"), tensor(0.0, "module")))  # fmt: skip
    def test_what_is_lost(self, name: str, then: dict[str, Any], now: dict[str, Any]) -> None:
        found = judge(self.rule, self.both({name: then}, {name: now}))
        assert found.status == "fail"
        assert name.replace("__", ".") in found.evidence

    @pytest.mark.parametrize("name", ["main__seen", "main__running_loss", "main__started"])
    def test_what_only_a_log_reads_may_start_again(self, name: str) -> None:
        assert judge(self.rule, self.both({name: held(2.0)}, {name: held(0.0)})).status == "not_applicable"

    def test_what_comes_back(self) -> None:
        assert judge(self.rule, self.both({"ema": tensor(1.0)}, {"ema": tensor(1.0)})).status == "pass"

    @pytest.mark.parametrize(("later", "status"), [(5.0, "fail"), (4.0, "pass")])
    def test_what_is_made_of_it_steps_later(self, later: float, status: str) -> None:
        """The average is restored, and parts from that of the run that went on: its number of updates was not."""
        all_steps = steps(5)
        values = [state(k, main__ema__shadow=tensor(float(k)), main__ema__updates=held(float(k))) for k in range(1, 6)]
        train = [one for k, value in enumerate(values) for one in (*all_steps[3 * k : 3 * k + 3], value)]
        train[8:8] = [SAVE]
        resumed = []
        for k, size in ((3, 3.0), (4, later), (5, 5.0)):
            now = state(
                k - 2, main__ema__shadow=tensor(size), main__ema__updates=held(size if status == "pass" else k - 2.0)
            )
            resumed += [micro(k - 2, rows=(k,)), step(k - 2), stepped(k - 2), now]
        found = judge(self.rule, of(train, train, resume=run(resumed, resumed, role="resume")))
        assert found.status == status
        assert ("main.ema.updates" in found.evidence) is (status == "fail")

    def test_the_state_was_not_recorded(self) -> None:
        resumed = run([micro(1), step(1), stepped(1)], role="resume")
        assert judge(self.rule, of([*steps(4)[:6], SAVE, *steps(4)[6:]], resume=resumed)).status == "inconclusive"


class TestRanks:
    rule = "state-same-on-ranks"

    def two(self, name: str, a: dict[str, Any], b: dict[str, Any], began: float = 0.0) -> Finding:
        """Rank 1 begins with a number that is `began` larger."""
        first = [held(-1.0), held(began - 1.0)] if a["value"] is not None else [tensor(9.0, a["holder"])] * 2
        pairs = zip(first, (a, b), strict=True)
        ranks = [[*steps(), state(1, **{name: old}), state(3, **{name: new})] for old, new in pairs]
        return judge(self.rule, of(*ranks))

    def test_buffers_and_decisions(self) -> None:
        assert self.two("model__mean", tensor(1.0, "module"), tensor(2.0, "module")).status == "fail"
        assert self.two("main__best", held(1.0), held(2.0)).status == "fail"
        assert self.two("model__mean", tensor(1.0, "module"), tensor(1.0, "module")).status == "pass"

    def test_running_statistics_differ_from_the_first_forward_on(self) -> None:
        ranks = [
            [*steps(), state(1, model__mean=tensor(k, "module")), state(3, model__mean=tensor(3.0 * k, "module"))]
            for k in (1, 2)
        ]
        assert judge(self.rule, of(*ranks)).status == "fail"

    def test_a_position_that_differs_from_the_first_step_on(self) -> None:
        assert self.two("main__best", held(1.0), held(2.0), began=1.0).status == "pass"

    def test_a_parameter_outside_of_every_model(self) -> None:
        assert self.two("main__scale", tensor(1.0, "parameter"), tensor(2.0, "parameter")).status == "fail"

    def test_batches_and_losses_are_local(self) -> None:
        assert self.two("main__batch", tensor(1.0), tensor(2.0)).status == "pass"
        assert self.two("main__loss", held(1.0), held(2.0)).status == "pass"

    def test_one_rank_has_the_only_copy(self) -> None:
        assert judge(self.rule, of(steps())).status == "not_applicable"


class TestModel:
    rule = "same-model-throughout"

    def test_eval_mode_is_left_on(self) -> None:
        records = [*steps(), state(1), state(2, evaluations=1, in_eval=("",))]
        assert judge(self.rule, of(records, records)).status == "fail"

    def test_a_part_that_is_always_in_eval_mode(self) -> None:
        records = [*steps(), state(1, in_eval=("norm",)), state(2, evaluations=1, in_eval=("norm",))]
        assert judge(self.rule, of(records, records)).status == "pass"

    def test_two_optimizers_hold_one_parameter(self) -> None:
        records = [*steps(), step(1, optimizer=1), stepped(1, optimizer=1)]
        assert judge(self.rule, of(records, records)).status == "fail"

    def test_a_wrapper_holds_what_its_inner_optimizer_holds(self) -> None:
        records = [micro(1), step(1), step(1, optimizer=1), stepped(1, optimizer=1), stepped(1)]
        assert judge(self.rule, of(records, records)).status == "pass"


class TestState:
    rule = "state-same-in-one-process"

    def judged(self, mine: float, theirs: float, other_rank: float | None = None) -> Finding:
        def of_rank(value: float) -> list[dict[str, Any]]:
            return [*steps(), state(1, main__average=tensor(0.5)), state(2, main__average=tensor(value))]

        one = of_rank(theirs)
        rows = [{**r, "rows": r["rows"] * 2} if r["kind"] == "micro" else r for r in one]
        train = run(of_rank(mine), of_rank(mine if other_rank is None else other_rank))
        single = run([{"kind": "model", "starting_point": "loaded"}, *rows], role="single")
        return judge(self.rule, Evidence(train=train, full_precision=train, single=single, sources=SOURCES))

    def test_a_tensor_beside_the_weights(self) -> None:
        assert self.judged(1.5, 1.0).status == "fail"
        assert self.judged(1.5, 1.5).status == "pass"

    def test_what_differs_between_ranks_is_data_of_theirs(self) -> None:
        assert self.judged(1.5, 1.0, other_rank=2.0).status == "not_applicable"


class TestSnapshot:
    rule = "snapshot-is-a-copy"

    def judged(self, path: str, live: bool) -> Finding:
        values = {path: tensor(1.0, live=live)}
        return judge(self.rule, of([*steps(), {**state(2), "values": values}]))

    def test_weights_that_are_kept_under_a_comparison(self) -> None:
        assert self.judged("main.kept['w']", True).status == "fail"
        assert self.judged("main.kept['w']", False).status == "pass"

    def test_other_variables_may_be_live(self) -> None:
        assert self.judged("main.shards[0]", True).status == "not_applicable"


class TestWatched:
    rule = "watched-values-agree"

    def judged(self, mine: float, theirs: float, *texts: str) -> Finding:
        ranks = [[*steps(), {**state(1), "values": {"watch best": held(v, "watch")}}] for v in (mine, theirs)]
        return judge(self.rule, of(*ranks, watch=tuple(map(watched, texts))))

    def test_ranks_hold_other_values(self) -> None:
        assert self.judged(1.0, 2.0, "best").status == "fail"
        assert self.judged(1.0, 1.0, "best").status == "pass"

    @pytest.mark.parametrize("text", ["best rank-local", "best across=resume"])
    def test_what_no_other_run_holds_proves_nothing(self, text: str) -> None:
        assert self.judged(1.0, 2.0, text).status == "inconclusive"

    def test_what_is_nowhere(self) -> None:
        assert self.judged(1.0, 1.0, "other").status == "inconclusive"
        assert self.judged(1.0, 1.0, "bes").status == "inconclusive"
        assert self.judged(1.0, 1.0).status == "not_applicable"


class TestEvaluation:
    rule = "evaluation-same-in-one-process"

    def two(self, mine: float, theirs: float) -> Finding:
        ranks = [[*steps(), state(1), state(2, evaluations=1, main__value=held(v))] for v in (mine, theirs)]
        train, single = run(ranks[0], ranks[0]), run(ranks[1], role="single")
        rows = [{**r, "rows": r["rows"] * 2} if r["kind"] == "micro" else r for r in ranks[1]]
        single = run([{"kind": "model", "starting_point": "loaded"}, *rows], role="single")
        return judge(self.rule, Evidence(train=train, full_precision=train, single=single, sources=SOURCES))

    def test_a_training_loss_is_no_evaluation(self) -> None:
        records = [*steps(), state(1), state(2, evaluations=1, main__loss=held(1.0), train_step__loss=held(1.0))]
        assert evaluated(run(records), SOURCES) == set()

    def test_another_value_in_one_process(self) -> None:
        found = self.two(1.5, 1.0)
        assert (found.status, found.measured) == ("fail", pytest.approx(1 / 3))
        assert self.two(1.0, 1.0).status == "pass"

    def test_no_evaluation(self) -> None:
        assert judge(self.rule, of(steps(), steps())).status == "not_applicable"


def test_a_replaced_parameter_is_read() -> None:
    read = {"kind": "replaced_read", "name": "w", "by": "norm", "step": 1}
    assert judge("replaced-parameter-read", of([*steps(), read], steps())).status == "fail"
    assert judge("replaced-parameter-read", of(steps(), steps())).status == "pass"


@pytest.mark.parametrize("loss, status", [(2.0, "fail"), (1.0, "pass")])
def test_the_sum_of_micro_batches(loss: float, status: str) -> None:
    records = [micro(1, loss / 2, criteria=entropy(4, 1.0))] * 2 + [step(1), stepped(1)]
    assert judge("gradient-of-mean-loss", of(records, records)).status == status


@pytest.mark.parametrize("samples, status", [(64, "fail"), (1, "pass"), (0, "not_applicable")])
def test_the_same_samples_in_every_step(samples: int, status: str) -> None:
    same = [one for k in range(1, 5) for one in (micro(k, rows=(7,)), step(k), stepped(k))]
    loader = [{"kind": "loader_started", "samples": samples, "step": 1}] * bool(samples)
    assert judge("same-samples-every-step", of([*loader, *same], [*loader, *same])).status == status


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.family == "laws"])
def test_no_run_and_no_steps(name: str) -> None:
    assert judge(name, Evidence(missing={"train": "not run"})).status == "inconclusive"
    assert judge(name, of([], [])).status == "inconclusive"
