"""What is not a fault of the script: small differences without a limit, zero but for rounding, a DDP that cannot take part."""

from dataclasses import replace
from typing import Any

import pytest

from corpus import TESTS
from records import LINE, cases, entropy, judged_as, micro, model, parameter, row, run, step, stepped
from verified_fsdp2.verifier.analysis.comparison import FLOOR, GROSS, MEASURES, compare, limits
from verified_fsdp2.verifier.analysis.factors import NOT_DIVIDED, readings
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judge import judge_one
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.trace import Ended, Run
from verified_fsdp2.verifier.trace.events import Micro, Renamed, Step, Stepped

DIRECTION = (1.0, -2.0, 0.5, 3.0)
NAMES = ("a.weight", "b.weight")


def vector(length: float) -> list[float]:
    return [length * length * 4.0, *(length * x for x in DIRECTION)]


def trained(
    ranks: int = 2,
    losses: tuple[float, ...] = (3.0, 2.0, 1.0),
    grads: dict[str, float | None] | None = None,
    moves: float = 0.1,
    along: float = -0.1,
    role: str = "train",
    **more: Any,
) -> Run:
    """A run of as many steps as losses; every gradient has one direction and the given length."""
    lengths = {**dict.fromkeys(NAMES, 1.0), **(grads or {})}
    found = {name: vector(length) if length is not None else None for name, length in lengths.items()}
    records = []
    for rank in range(ranks):
        rows: list[dict[str, Any]] = [model(*(parameter(name, copy=rank) for name in NAMES))]
        for k, loss in enumerate(losses):
            before = {name: [1.0, *(x * (1.0 - moves * k) for x in DIRECTION)] for name in NAMES}
            after = {name: [1.0, *(x * (1.0 - moves * (k + 1)) for x in DIRECTION)] for name in NAMES}
            moved = {name: [0.01, along, 8.0] for name in NAMES}
            own = tuple(range(1 + rank, 9, ranks))
            rows += [micro(k + 1, loss, own), step(k + 1, found, weights=before)]
            rows += [stepped(k + 1, weights=after, moved=moved)]
        records.append(rows)
    return run(*records, role=role, **more)


def judge(rule: str, mine: Run, reference: Run | None, single: Run | None, **more: Any) -> Finding:
    return judge_one(RULES[rule], Evidence(train=mine, full_precision=mine, reference=reference, single=single, **more))


class TestWithoutNoise:
    """The limit is derived from the perturbed run; without it there is none between rounding and a gross difference."""

    @cases("length, status", (1.0, "pass"), (1.001, "inconclusive"), (1.5, "fail"))
    def test_no_envelope(self, length: float, status: str) -> None:
        found = judge("matches-single-process", trained(grads={"a.weight": length}), None, trained(1))
        assert found.status == status, found.evidence

    def test_an_envelope_that_ended_early_or_whose_numbers_are_not_finite(self) -> None:
        mine, single = trained(grads={"a.weight": 1.001}), trained(1)
        short = trained(1, losses=(3.0, 2.0), role="perturbed")
        broken = trained(1, losses=(3.0, 2.0, float("nan")), role="perturbed")
        whole = trained(1, role="perturbed")
        for perturbed, status in ((short, "inconclusive"), (broken, "inconclusive"), (whole, "fail")):
            assert judge("matches-single-process", mine, None, single, perturbed=perturbed).status == status
        found = [limits(Evidence(single=single, perturbed=one), "matches-ddp") for one in (short, whole, broken)]
        assert found[0].underived and not found[1].underived
        assert (found[2].allowed["loss"], found[2].gross["loss"]) == (FLOOR, GROSS)

    @cases("loss, status", (2.0, "pass"), (2.001, "inconclusive"), (3.0, "fail"))
    def test_resharding(self, loss: float, status: str) -> None:
        save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "", "keys": []}
        whole = run([model(), micro(1, 4.0), step(1), stepped(1), save, micro(2, 2.0), step(2), stepped(2)])
        other = run([model(), micro(1, loss), step(1), stepped(1)], role="reshard")
        evidence = Evidence(train=whole, full_precision=whole, resume_full_precision=whole, reshards=(other,))
        assert judge_one(RULES["reshard-keeps-trajectory"], evidence).status == status


class TestScale:
    """A difference is relative to what the quantity can resolve."""

    def test_a_loss_that_is_or_fell_to_zero_but_for_rounding(self) -> None:
        mine, oracle = trained(losses=(1e-9, -2e-9, 1e-9)), trained(1, losses=(0.0, 0.0, 0.0))
        assert compare(mine, oracle).measures["loss"] < FLOOR
        oracle = trained(1, losses=(3.0, 1.0, 0.0))
        assert (
            compare(trained(losses=(3.0, 1.0, 1e-7)), oracle).measures["loss"]
            < FLOOR
            < compare(trained(losses=(3.0, 1.0, 0.1)), oracle).measures["loss"]
        )

    def test_terms_that_cancel_between_ranks(self) -> None:
        """The scale is that of the losses of ranks and micro-batches, not of their sum."""
        oracle = trained(2, losses=(1.0, 1.0, 1.0), along=0.0)
        for trace, sign in zip(oracle.traces, (1.0, -1.0), strict=True):
            for record in trace.of(Micro):
                object.__setattr__(record, "loss", sign)
        assert compare(trained(losses=(1e-8, 1e-8, 1e-8)), oracle).measures["loss"] < FLOOR

    @cases("other, agrees", (None, True), (0.0, True), (1e-9, True), (0.1, False))
    def test_a_gradient_of_rounding_beside_none_or_zero(self, other: float | None, agrees: bool) -> None:
        mine, oracle = trained(grads={"b.weight": 1e-9}), trained(1, grads={"b.weight": other})
        found = compare(mine, oracle)
        assert (max(found.measures[name] for name in MEASURES[2:4]) <= FLOOR) is agrees
        assert compare(trained(), trained(1, grads={"b.weight": None})).measures["first gradient"] == 1.0, (
            "a gradient against none"
        )

    def test_a_first_gradient_that_is_zero(self) -> None:
        """An output layer that starts at zero: the whole gradient of step 1 is zero, that of later steps is not."""
        runs = []
        for length in (1e-9, 0.0):
            found = trained(1)
            for name in ("grads", "grads_at_step"):
                object.__setattr__(found.traces[0].of(Step)[0], name, {key: vector(length) for key in NAMES})
            runs.append(found)
        measured = compare(*runs)
        assert max(measured.measures[name] for name in MEASURES[1:4]) <= FLOOR


ODD: dict[str, float | None] = {"a.weight": 1.5}


@cases(
    "reference, single, more, status",
    (trained(grads=ODD, role="reference"), trained(1), {}, "pass"),  # DDP alone differs
    (trained(grads=ODD, role="reference"), trained(1, grads={"a.weight": 1.25}), {}, "fail"),
    (trained(grads=ODD, role="reference"), None, {}, "fail"),  # without a word of one process
    (trained(grads=ODD, role="reference"), trained(1), {"missing": {"ddp": "rank 0 raised AttributeError"}}, "pass"),
)
def test_what_one_process_computes_too_is_no_fault(
    reference: Run, single: Run | None, more: dict[str, Any], status: str
) -> None:
    found = judge("matches-ddp", trained(), reference, single, **more)
    assert found.status == status, found.evidence


@pytest.mark.full
@pytest.mark.launch
@cases("name", "shard_norm_clip", "thawed_after_wrapping", "tp_some_modules")
def test_what_ddp_cannot_do_is_no_fault(verify_script, name: str) -> None:
    verdict = verify_script(TESTS / "zoo" / f"{name}.py", only=("matches-ddp", "matches-single-process"))
    assert {f.rule: f.status for f in verdict.findings} == {"matches-ddp": "pass", "matches-single-process": "pass"}


class TestOptimizersInBackward:
    """An optimizer for each parameter: the first steps while gradients of the others are still to be reduced."""

    @staticmethod
    def rank(unsynced_b: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        start = {"a.weight": vector(1.0), "b.weight": vector(1.0)}
        a = {"optimizer": 0, "weights": start, "unsynced": ["b.weight"], "held": ["a.weight"]}
        b = {"optimizer": 1, "weights": start, "unsynced": list(unsynced_b), "held": ["b.weight"]}
        first = {"a.weight": vector(0.9), "b.weight": vector(1.0)}
        then = {"a.weight": vector(0.9), "b.weight": vector(0.8)}
        still = [0.0, 0.0, 0.0]
        return [
            model(parameter("a.weight"), parameter("b.weight")),
            step(1, {}, **{**a, "grads_at_step": {"a.weight": vector(2.0), "b.weight": None}}),
            stepped(1, optimizer=0, weights=first, moved={"a.weight": [1.0, -1.0, 8.0], "b.weight": still}),
            step(1, {}, **{**b, "grads_at_step": {"a.weight": None, "b.weight": vector(3.0)}}),
            stepped(1, optimizer=1, weights=then, moved={"a.weight": still, "b.weight": [2.0, -2.0, 8.0]}),
            micro(1),
        ]

    @pytest.mark.parametrize(("unsynced", "status"), [((), "pass"), (("a.weight",), "pass"), (("b.weight",), "fail")])
    def test_each_is_judged_by_its_own_parameters(self, unsynced: tuple[str, ...], status: str) -> None:
        assert judge_one(RULES["accum-never-resynced"], Evidence(train=run(self.rank(unsynced)))).status == status

    def test_a_step_is_what_all_of_them_found_and_changed(self) -> None:
        train = run(self.rank())
        assert train.whole(Step, "grads_at_step", 1) == {"a.weight": vector(2.0), "b.weight": vector(3.0)}
        assert train.whole(Stepped, "weights", 1) == {"a.weight": vector(0.9), "b.weight": vector(0.8)}
        assert train.along(1) == -3.0


@pytest.mark.full
@pytest.mark.launch
def test_an_optimizer_that_steps_in_backward_is_right(verify_script) -> None:
    rules = ("accum-never-resynced", "matches-ddp", "matches-single-process", "same-data-on-every-rank")
    verdict = verify_script(TESTS / "zoo" / "step_in_backward.py", only=rules)
    assert {f.status for f in verdict.findings} == {"pass"}


A, B, C = ([k, k, 0.0, 0.0, 0.0] for k in (1.0, 2.0, 3.0))


def saving(after: int, to: str, weights: dict[str, Any], **entries: list[float]) -> dict[str, Any]:
    given = {key: {"kind": "dtensor", "sketch": value, "sharded": True} for key, value in entries.items()}
    base = {"kind": "saving", "op": "save", "call": after, "after_step": after, "to": to, "main": True, "alone": False}
    return {**base, "entries": given, "random": [], "weights": weights, "state": {}}


def refused(command: str) -> Run:
    end = {"kind": "end", "how": "exception", "error": "OSError", "message": "no .metadata", "frames": []}
    made = run([end], role="recovered", command=command)
    for trace in made.traces:
        object.__setattr__(trace, "records", trace.records[:1])
    return replace(made, ended=(Ended(0, 1, False),))


class TestNamedByHand:
    """A command that names one checkpoint leaves the script nothing to choose."""

    @staticmethod
    def train(*places: tuple[int, str]) -> Run:
        rows: list[dict[str, Any]] = [model()]
        for k in range(1, 6):
            rows += [micro(k), step(k, weights={"w": [k, k, 0.0, 0.0, 0.0]}), stepped(k)]
            own = [place for after, place in places if after == k]
            rows += [{"kind": "checkpoint", "op": "save", "after_step": k, "to": to, "keys": []} for to in own]
        return run(rows)

    @cases(
        "command, step_",
        ("--resume {checkpoint}/step2", 2),
        ("--resume={checkpoint}/step4/", 4),
        ("--resume {checkpoint}", 2),
        ("--resume {checkpoint}/step6", 2),
        ("--resume {checkpoint}/step", 2),
    )
    def test_what_the_resume_is_compared_with(self, command: str, step_: int) -> None:
        train = self.train((2, "/c/step2"), (4, "/c/step4"))
        assert Evidence(train=train).saved_after(command) == step_
        assert Evidence(train=train, resume=run([model()], command=command)).saved_after() == step_

    def test_a_name_that_it_was_given_later(self) -> None:
        train = self.train((2, "/c/step2.tmp"), (4, "/c/step4.tmp"))
        renamed = Renamed(old="/c/step2.tmp", new="/c/step2", seq=99, at=99.0)
        object.__setattr__(train.traces[0], "records", (*train.traces[0].records, renamed))
        assert Evidence(train=train).saved_after("--resume {checkpoint}/step2") == 2

    @cases(
        "command, places, status",
        ("--resume {checkpoint}/step4", ("/c/step2", "/c/step4"), "not_applicable"),
        ("--resume {checkpoint}", ("/c/step2", "/c/step4"), "fail"),
        ("--resume {checkpoint}/run", ("/c/run/step2", "/c/run/step4"), "fail"),
    )
    def test_a_save_that_was_cut(self, command: str, places: tuple[str, str], status: str) -> None:
        train = self.train((2, places[0]), (4, places[1]))
        rows = [model(), step(1), saving(2, places[0], {"w": A}), saving(4, places[1], {"w": B}), {"kind": "killed"}]
        evidence = Evidence(train=train, crashes=((run(rows, role="crash", note="killed"), refused(command)),))
        assert judge_one(RULES["incomplete-checkpoint-chosen"], evidence).status == status


class TestAverageInTheCheckpoint:
    """While it saves, the script has an average in the model; what the next step finds lies under another key."""

    @pytest.mark.parametrize(("weights", "status"), [((A, A), "pass"), ((A, B), "fail")])
    def test_a_resume_after_a_crash(self, weights: tuple[list[float], list[float]], status: str) -> None:
        average = [0.5, 0.5, 0.0, 0.0, 0.0]
        base = [model(), step(weights={"w": C}), stepped(), {"kind": "checkpoint", "op": "save", "after_step": 1}]
        whole = run([*base, step(2, weights={"w": A}), stepped(2)])
        crash = run(
            [
                model(),
                step(1, weights={"w": C, "v": C}),
                saving(1, "/c/1", {"w": average, "v": average}, **{"raw.w": A, "raw.v": A, "model.w": average}),
                step(2, weights={"w": A, "v": A}),
                saving(2, "/c/2", {"w": average, "v": average}, **{"raw.w": B, "raw.v": B, "model.w": average}),
                {"kind": "killed"},
            ],
            role="crash",
            note="killed",
        )
        again = run([model(), step(weights=dict(zip("wv", weights, strict=True))), stepped()], role="recovered")
        resume = run([model(), step(weights={"w": A}), stepped()])
        evidence = Evidence(train=whole, resume=resume, crashes=((crash, again),))
        assert judge_one(RULES["partial-overwrite-mixes-checkpoints"], evidence).status == status


def scaled(ranks: int, weights: float, factor: float, micros: int, **more: Any) -> Run:
    """One step; every micro-batch has a mean cross entropy of 2 and a loss of `weights` times it; gradients of length `factor`."""
    records = []
    for rank in range(ranks):
        rows: list[dict[str, Any]] = [model(parameter("w", copy=rank))]
        number = 8 // (ranks * micros)
        for k in range(micros):
            first = (k * ranks + rank) * number
            own = tuple(range(first, first + number))
            rows.append(micro(1, 2.0 * weights, own, criteria=entropy(number, 2.0), at_line=replace(LINE, line=10)))
        rows += more.get("extra", [])
        rows.append(step(1, {"w": vector(factor)}, at_line=replace(LINE, line=20)))
        rows.append(stepped(1))
        records.append(rows)
    return run(*records)


class TestFactors:
    """Two ranks and two micro-batches: a factor of two is distinguished by the losses and by one process, or reported as either."""

    @cases(
        "mine, oracle, causes",
        # The loss is right on two ranks: what doubles the gradient comes after it.
        ((0.5, 2), (1.0, 1), {"ranks"}),
        # One process makes two micro-batches as well, and is right: it is not their number.
        ((1.0, 2), (0.5, 2), {"ranks"}),
        # One process makes four and does not divide either (its gradient is four times as large as it should be).
        ((1.0, 2), (1.0, 4), {NOT_DIVIDED}),
        # One process makes one: both fit.
        ((1.0, 2), (1.0, 1), {"ranks", NOT_DIVIDED}),
    )
    def test_what_fits(self, mine: tuple[float, int], oracle: tuple[float, int], causes: set[str]) -> None:
        two, one = scaled(2, mine[0], 1.0, mine[1]), scaled(1, oracle[0], 1.0, oracle[1])
        assert {r.cause for r in readings(0.5 if oracle[1] == 4 else 2.0, two, one)} == causes

    def test_world_size_and_micro_batches_do_not_collide(self) -> None:
        """Both readings are in the report, neither hides the other."""
        two, one = scaled(2, 1.0, 2.0, 2), scaled(1, 1.0, 1.0, 1)
        found = judge_one(RULES["double-or-missing-world-scale"], Evidence(train=two, full_precision=two, single=one))
        assert (found.status, found.measured) == ("fail", 2.0)
        assert all(r.text in found.evidence for r in readings(2.0, two, one))

    @pytest.mark.parametrize(("factor", "line"), [(1.0, 5), (3.0, 10)])
    def test_the_line_is_that_of_the_division_where_it_is_known(self, factor: float, line: int) -> None:
        """A divide factor that does not explain the ratio is not where it comes from."""
        divide = {"kind": "divide", "factor": factor, "at_line": replace(LINE, line=5)}
        two, one = scaled(2, 1.0, 2.0, 1, extra=[divide]), scaled(1, 1.0, 1.0, 1)
        found = judge_one(RULES["double-or-missing-world-scale"], Evidence(train=two, full_precision=two, single=one))
        assert found.status == "fail"
        assert (found.location or LINE).line == line

    @cases(
        "text, line",
        ("def main():\n    loss = model(x) / world\n    loss.backward()", 2),
        ("def main():\n    loss = model(x)\n    loss /= world\n    log(loss)\n    loss.backward()", 3),
        ("def main():\n    loss = model(x) * 2\n    total = loss / 2\n    accelerator.backward(loss)", 2),
        ("def other():\n    loss = f(x) / 2\n\ndef main():\n    loss.backward()", 5),
    )
    def test_the_line_is_that_where_the_loss_is_scaled(self, text: str, line: int) -> None:
        two, one = scaled(2, 1.0, 2.0, 1), scaled(1, 1.0, 1.0, 1)
        for trace in two.traces:
            for record in trace.of(Micro):
                object.__setattr__(record, "at_line", replace(LINE, line=len(text.splitlines())))
        sources = Sources({LINE.file: text}, (LINE.file,))
        evidence = Evidence(train=two, full_precision=two, single=one, sources=sources)
        found = judge_one(RULES["double-or-missing-world-scale"], evidence)
        assert (found.status, (found.location or LINE).line) == ("fail", line)

    def test_between_backward_and_step(self) -> None:
        two, one = scaled(2, 1.0, 1.0, 1), scaled(1, 1.0, 1.0, 1)
        for trace in two.traces:
            object.__setattr__(trace.of(Step)[0], "grads_at_step", {"w": vector(2.0)})
        found = judge_one(RULES["double-or-missing-world-scale"], Evidence(train=two, full_precision=two, single=one))
        assert (found.status, (found.location or LINE).line) == ("fail", 20)


class TestLocationsOfResumes:
    """What a resume does not bring back is reported where the resumed run loads."""

    @staticmethod
    def evidence(resumed: dict[str, Any], **rows: Any) -> Evidence:
        save = {"kind": "checkpoint", "op": "save", "after_step": 1, "at_line": replace(LINE, line=30)}
        load = {"kind": "checkpoint", "op": "load", "after_step": 0, "at_line": replace(LINE, line=40)}
        ranks = [
            [model(), micro(), step(), stepped(), save, micro(2, rows=(1, 2)), step(2), stepped(2, weights={"w": B})]
        ]
        again = [[model(), load, micro(**{"rows": (1, 2), **rows}), step(**resumed), stepped(1, weights={"w": A})]]
        train, resume = run(*ranks), run(*again, role="resume")
        return Evidence(
            train=train, resume=resume, resume_full_precision=train, reshards=(replace(resume, role="reshard"),)
        )

    @cases(
        "rule, evidence",
        ("resume-is-exact", {}),
        ("load-without-set", {"weights": {"w": C}}),
        ("scheduler-or-progress-not-restored", {"lr": [0.2]}),
        ("reshard-keeps-trajectory", {"weights": {"w": C}}),
    )
    def test_the_load_is_named(self, rule: str, evidence: dict[str, Any]) -> None:
        found = judge_one(RULES[rule], self.evidence(evidence))
        assert (found.status, found.location) == ("fail", replace(LINE, line=40))


def sampled(*steps: tuple[range, range], losses: tuple[float, ...] = ()) -> Run:
    ranks: list[list[dict[str, Any]]] = []
    for rank in range(2):
        rows: list[dict[str, Any]] = [model()]
        for k, own in enumerate(steps, 1):
            rows += [micro(k, losses[k - 1] if losses else 1.0, tuple(own[rank])), step(k), stepped(k)]
        ranks.append(rows)
    return run(*ranks)


FIRST, THEN, MORE = range(8), range(8, 16), range(16, 24)
ONE, TWO, THREE, FOUR, FIVE = (range(k, k + 1) for k in range(1, 6))
# No rank trains on another's samples in any step; what chance gives, or reaches no gradient, is no fault.
test_same_data = judged_as(
    row("same-data-on-every-rank", "fail", sampled((FIRST, THEN), (MORE, MORE))),
    row("same-data-on-every-rank", "fail", sampled((MORE, MORE), (FIRST, THEN))),
    row("same-data-on-every-rank", "pass", sampled((FIRST, THEN), (THEN, MORE))),
    row("same-data-on-every-rank", "fail", sampled((ONE, ONE), (TWO, TWO))),  # every step, however small
    row("same-data-on-every-rank", "inconclusive", sampled((ONE, TWO), (THREE, THREE), (FOUR, FIVE))),  # by chance
    row("same-data-on-every-rank", "pass", sampled((FIRST, THEN), (MORE, MORE), losses=(1.0, 0.0))),  # a dummy batch
)
