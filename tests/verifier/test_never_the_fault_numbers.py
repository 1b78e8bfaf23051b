"""What is not a fault of the script: small differences without a limit, zero but for rounding, a
DDP that cannot take part.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import made_up_plan
from test_rules_checkpoint import A, B, C, saving

from corpus import TESTS
from records import (
    LINE,
    NAMES,
    cases,
    end,
    entropy,
    event,
    judge,
    judged_as,
    micro,
    model,
    parameter,
    row,
    run,
    step,
    stepped,
    trained,
    vector,
)
from verified_fsdp2.verifier import stages
from verified_fsdp2.verifier.analysis.comparison import MEASURES, compare
from verified_fsdp2.verifier.analysis.gradient_scale_causes import NOT_DIVIDED, readings
from verified_fsdp2.verifier.analysis.limits import limits
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.pipeline import so_far
from verified_fsdp2.verifier.tolerances import FLOOR, GROSS
from verified_fsdp2.verifier.trace import Run
from verified_fsdp2.verifier.trace.events import Micro, Renamed, Step, Stepped

SINGLE, DDP = "matches-single-process", "matches-ddp"
SHORT = trained(1, losses=(3.0, 2.0), role="perturbed")
BROKEN = trained(1, losses=(3.0, 2.0, float("nan")), role="perturbed")
WHOLE = trained(1, role="perturbed")


def off(length: float) -> Run:
    """A run in which the gradient of one parameter has another length than 1."""
    return trained(grads={"embed.weight": length})


# The limit is derived from the perturbed run; without it there is none between rounding and a gross
# difference.
test_without_noise = judged_as(
    *(
        row(SINGLE, s, off(k), single=trained(1))
        for k, s in ((1.0, "pass"), (1.001, "inconclusive"), (1.5, "fail"))
    ),
    *(
        row(
            SINGLE, status, off(1.001), single=trained(1), perturbed=perturbed
        )  # it ended early, or is not finite
        for perturbed, status in (
            (SHORT, "inconclusive"),
            (BROKEN, "inconclusive"),
            (WHOLE, "fail"),
        )
    ),
)


def test_numbers_that_are_not_finite_say_from_when_and_what_would_show_why() -> None:
    nan = trained(losses=(float("nan"),) * 3)
    emptied = replace(
        nan,
        traces=tuple(
            replace(own, records=(event({"kind": "to_empty"}), *own.records)) for own in nan.traces
        ),
    )
    for own, more, said in (
        (nan, {}, False),
        (emptied, {}, True),
        (emptied, {"provoked": trained()}, False),
    ):
        found = judge(SINGLE, own, single=trained(1, losses=(float("nan"),) * 3), **more)
        assert (found.status, "loss from step 1 on" in found.evidence) == ("inconclusive", True)
        assert ("without --quick" in found.evidence) is said


@cases("length, made", (1.0, []), (1.001, ["perturbed"]))
def test_the_noise_is_measured_where_it_decides(
    length: float, made: list[str], tmp_path: Path
) -> None:
    settings = made_up_plan(tmp_path, SINGLE, DDP)
    evidence = Evidence(
        train=off(length),
        full_precision=off(length),
        reference=trained(role="reference"),
        single=trained(1),
    )
    assert [
        run.role for run in stages.perturbed(settings, evidence, so_far(settings, evidence))
    ] == made


def test_limits_where_the_perturbed_run_ended_early_or_is_not_finite() -> None:
    found = [
        limits(Evidence(single=trained(1), perturbed=one), DDP) for one in (SHORT, WHOLE, BROKEN)
    ]
    assert found[0].underived and not found[1].underived
    assert (found[2].allowed["loss"], found[2].gross["loss"]) == (FLOOR, GROSS)


def resaved(loss: float) -> dict[str, Any]:
    other = run([model(), micro(1, loss), step(1), stepped(1)], role="reshard")
    return {"resume_full_precision": RESAVED, "reshards": (other,)}


SAVE = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "", "keys": []}
RESAVED = run(
    [model(), micro(1, 4.0), step(1), stepped(1), SAVE, micro(2, 2.0), step(2), stepped(2)]
)
test_resharding_without_noise = judged_as(
    *(
        row("reshard-keeps-trajectory", status, RESAVED, **resaved(loss))
        for loss, status in ((2.0, "pass"), (2.001, "inconclusive"), (3.0, "fail"))
    )
)


# -- a difference is relative to what the quantity can resolve


def test_a_loss_that_is_or_fell_to_zero_but_for_rounding() -> None:
    def apart(mine: tuple[float, ...], theirs: tuple[float, ...]) -> float:
        return compare(trained(losses=mine), trained(1, losses=theirs)).measures["loss"]

    assert apart((1e-9, -2e-9, 1e-9), (0.0, 0.0, 0.0)) < FLOOR
    assert (
        apart((3.0, 1.0, 1e-7), (3.0, 1.0, 0.0)) < FLOOR < apart((3.0, 1.0, 0.1), (3.0, 1.0, 0.0))
    )


def test_terms_that_cancel_between_ranks() -> None:
    """The scale is that of the losses of ranks and micro-batches, not of their sum."""
    oracle = trained(2, losses=(1.0, 1.0, 1.0), along=0.0)
    for trace, sign in zip(oracle.traces, (1.0, -1.0), strict=True):
        for record in trace.of(Micro):
            object.__setattr__(record, "loss", sign)
    assert compare(trained(losses=(1e-8, 1e-8, 1e-8)), oracle).measures["loss"] < FLOOR


@cases("other, agrees", (None, True), (0.0, True), (1e-9, True), (0.1, False))
def test_a_gradient_of_rounding_beside_none_or_zero(other: float | None, agrees: bool) -> None:
    found = compare(trained(grads={"head.weight": 1e-9}), trained(1, grads={"head.weight": other}))
    assert (max(found.measures[name] for name in MEASURES[2:4]) <= FLOOR) is agrees
    assert (
        compare(trained(), trained(1, grads={"head.weight": None})).measures["first gradient"]
        == 1.0
    ), "a gradient against none"


def test_a_first_gradient_that_is_zero() -> None:
    """An output layer that starts at zero: the whole gradient of step 1 is zero, that of later
    steps is not.
    """
    runs = [trained(1), trained(1)]
    for found, length in zip(runs, (1e-9, 0.0), strict=True):
        for name in ("grads", "grads_at_step"):
            object.__setattr__(
                found.traces[0].of(Step)[0], name, {key: vector(length) for key in NAMES}
            )
    measured = compare(*runs)
    assert max(measured.measures[name] for name in MEASURES[1:4]) <= FLOOR


ODD = trained(grads={"embed.weight": 1.5}, role="reference")
LACKS = {"missing": {"ddp": "rank 0 raised AttributeError"}}
test_what_one_process_computes_too_is_no_fault = judged_as(
    row(DDP, "pass", trained(), reference=ODD, single=trained(1)),  # DDP alone differs
    row(DDP, "fail", trained(), reference=ODD, single=trained(1, {"embed.weight": 1.25})),
    row(DDP, "fail", trained(), reference=ODD),  # without a word of one process
    row(DDP, "pass", trained(), reference=ODD, single=trained(1), **LACKS),
)


@pytest.mark.full
@cases("name", "shard_norm_clip", "thawed_after_wrapping", "tp_some_modules")
def test_what_ddp_cannot_do_is_no_fault(verify_script, name: str) -> None:
    verdict = verify_script(
        TESTS / "zoo" / f"{name}.py", only=("matches-ddp", "matches-single-process")
    )
    assert {f.rule: f.status for f in verdict.findings} == {
        "matches-ddp": "pass",
        "matches-single-process": "pass",
    }


def in_backward(*unsynced_b: str) -> list[dict[str, Any]]:
    """An optimizer for each parameter: the first steps while gradients of the others are still to
    be reduced.
    """
    start, still = {"a": vector(1.0), "b": vector(1.0)}, [0.0, 0.0, 0.0]
    a = {
        "optimizer": 0,
        "unsynced": ["b"],
        "held": ["a"],
        "grads_at_step": {"a": vector(2.0), "b": None},
    }
    b = {
        "optimizer": 1,
        "unsynced": [*unsynced_b],
        "held": ["b"],
        "grads_at_step": {"a": None, "b": vector(3.0)},
    }
    first, then = ({"a": vector(0.9), "b": vector(length)} for length in (1.0, 0.8))
    return [
        model(parameter("a"), parameter("b")),
        step(1, {}, weights=start, **a),
        stepped(1, optimizer=0, weights=first, moved={"a": [1.0, -1.0, 8.0], "b": still}),
        step(1, {}, weights=start, **b),
        stepped(1, optimizer=1, weights=then, moved={"a": still, "b": [2.0, -2.0, 8.0]}),
        micro(1),
    ]


test_each_optimizer_is_judged_by_its_own_parameters = judged_as(
    *(
        row("accum-never-resynced", s, in_backward(*b))
        for b, s in (((), "pass"), (("a",), "pass"), (("b",), "fail"))
    )
)


def test_a_step_is_what_all_optimizers_found_and_changed() -> None:
    train = run(in_backward())
    assert train.whole(Step, "grads_at_step", 1) == {"a": vector(2.0), "b": vector(3.0)}
    assert train.whole(Stepped, "weights", 1) == {"a": vector(0.9), "b": vector(0.8)}
    assert train.along(1) == -3.0


@pytest.mark.full
def test_an_optimizer_that_steps_in_backward_is_right(verify_script) -> None:
    rules = (
        "accum-never-resynced",
        "matches-ddp",
        "matches-single-process",
        "same-data-on-every-rank",
    )
    verdict = verify_script(TESTS / "zoo" / "step_in_backward.py", only=rules)
    assert {f.status for f in verdict.findings} == {"pass"}


# -- a command that names one checkpoint leaves the script nothing to choose


def saved(*places: tuple[int, str]) -> Run:
    rows: list[dict[str, Any]] = [model()]
    for k in range(1, 6):
        rows += [micro(k), step(k), stepped(k)]
        rows += [{**SAVE, "after_step": k, "to": to} for after, to in places if after == k]
    return run(rows)


@cases(
    "command, step_",
    ("--resume {checkpoint}/step2", 2),
    ("--resume={checkpoint}/step4/", 4),
    ("--resume {checkpoint}", 2),
    ("--resume {checkpoint}/step6", 2),
    ("--resume {checkpoint}/step", 2),
)
def test_what_the_resume_is_compared_with(command: str, step_: int) -> None:
    train = saved((2, "/c/step2"), (4, "/c/step4"))
    assert Evidence(train=train).saved_after(command) == step_
    assert Evidence(train=train, resume=run([model()], command=command)).saved_after() == step_


def test_a_name_that_a_checkpoint_was_given_later() -> None:
    train = saved((2, "/c/step2.tmp"), (4, "/c/step4.tmp"))
    renamed = Renamed(old="/c/step2.tmp", new="/c/step2", at_line=None, seq=99, at=99.0)
    object.__setattr__(train.traces[0], "records", (*train.traces[0].records, renamed))
    assert Evidence(train=train).saved_after("--resume {checkpoint}/step2") == 2


@cases(
    "command, places, status",
    ("--resume {checkpoint}/step4", ("/c/step2", "/c/step4"), "not_applicable"),
    ("--resume {checkpoint}", ("/c/step2", "/c/step4"), "fail"),
    ("--resume {checkpoint}/run", ("/c/run/step2", "/c/run/step4"), "fail"),
)
def test_a_save_that_was_cut(command: str, places: tuple[str, str], status: str) -> None:
    saves = [
        saving({}, to=to, after=k, call=k, weights={"w": w})
        for k, to, w in zip((2, 4), places, (A, B), strict=True)
    ]
    crash = run([model(), step(1), *saves, {"kind": "killed"}], role="crash", note="killed")
    refused = run([end("OSError", "no .metadata")], role="recovered", command=command)
    train = saved((2, places[0]), (4, places[1]))
    assert (
        judge("incomplete-checkpoint-chosen", train, crashes=((crash, refused),)).status == status
    )


@cases("weights, status", ((A, A), "pass"), ((A, B), "fail"))
def test_an_average_in_the_checkpoint(
    weights: tuple[list[float], list[float]], status: str
) -> None:
    """While it saves, the script has an average in the model; what the next step finds lies under
    another key.
    """
    average = [0.5, 0.5, 0.0, 0.0, 0.0]
    whole = run(
        [model(), step(weights={"w": C}), stepped(), SAVE, step(2, weights={"w": A}), stepped(2)]
    )
    rows = [model(), step(1, weights={"w": C, "v": C})]
    for k, raw in ((1, A), (2, B)):
        tensors = {"raw.w": raw, "raw.v": raw, "model.w": average}
        entries = {
            key: {"kind": "dtensor", "sketch": value, "sharded": True}
            for key, value in tensors.items()
        }
        rows.append(
            saving(entries, to=f"/c/{k}", after=k, call=k, weights={"w": average, "v": average})
        )
        rows += [step(2, weights={"w": A, "v": A})] if k == 1 else [{"kind": "killed"}]
    again = run(
        [model(), step(weights=dict(zip("wv", weights, strict=True))), stepped()], role="recovered"
    )
    resume = run([model(), step(weights={"w": A}), stepped()])
    crashes = ((run(rows, role="crash", note="killed"), again),)
    found = judge("partial-overwrite-mixes-checkpoints", whole, resume=resume, crashes=crashes)
    assert (found.status, found.warns) == (status, status == "fail")  # only a crash shows it


# -- factors


def scaled(ranks: int, weights: float, factor: float, micros: int, **more: Any) -> Run:
    """One step; every micro-batch has a mean cross entropy of 2 and a loss of `weights` times it;
    gradients of length `factor`.
    """
    records = []
    for rank in range(ranks):
        rows: list[dict[str, Any]] = [model(parameter("w", copy=rank))]
        number = 8 // (ranks * micros)
        for k in range(micros):
            first = (k * ranks + rank) * number
            own = tuple(range(first, first + number))
            rows.append(
                micro(
                    1,
                    2.0 * weights,
                    own,
                    criteria=entropy(number, weights),
                    at_line=replace(LINE, line=10),
                )
            )
        rows += more.get("extra", [])
        grads = {"w": vector(factor), **more.get("grads", {})}
        rows.append(step(1, grads, at_line=replace(LINE, line=20)))
        rows.append(stepped(1))
        records.append(rows)
    return run(*records)


# Two ranks and two micro-batches: a factor of two is distinguished by the losses and by one
# process, or reported as either.
@cases(
    "mine, oracle, causes",
    # The loss is right on two ranks: what doubles the gradient comes after it.
    ((0.5, 2), (1.0, 1), {"ranks"}),
    # One process makes two micro-batches as well, and is right: it is not their number.
    ((1.0, 2), (0.5, 2), {"ranks"}),
    # One process makes four and does not divide either (its gradient is four times as large as it
    # should be).
    ((1.0, 2), (1.0, 4), {NOT_DIVIDED}),
    # One process makes one: both fit.
    ((1.0, 2), (1.0, 1), {"ranks", NOT_DIVIDED}),
)
def test_which_factor_fits(
    mine: tuple[float, int], oracle: tuple[float, int], causes: set[str]
) -> None:
    two, one = scaled(2, mine[0], 1.0, mine[1]), scaled(1, oracle[0], 1.0, oracle[1])
    assert {r.cause for r in readings(0.5 if oracle[1] == 4 else 2.0, two, one)} == causes


SCALE, ALONE = "double-or-missing-world-scale", scaled(1, 1.0, 1.0, 1)


def test_world_size_and_micro_batches_do_not_collide() -> None:
    """Both readings are in the report, neither hides the other."""
    two = scaled(2, 1.0, 2.0, 2)
    found = judge(SCALE, two, single=ALONE)
    assert (found.status, found.measured) == ("fail", 2.0)
    assert all(r.text in found.evidence for r in readings(2.0, two, ALONE))


@cases("size, status", (1e-8, "pass"), (1e-2, "fail"))
def test_a_factor_of_gradients_that_cancel_is_chance(size: float, status: str) -> None:
    """A bias before a softmax has no gradient: what rounding leaves of it may be half of what it
    leaves elsewhere.
    """
    two, one = (scaled(n, 1.0, 1.0, 1, grads={"b": vector(size / n)}) for n in (2, 1))
    assert judge(SCALE, two, full_precision=two, single=one).status == status


@cases("others, status", (1.0, "pass"), (2.0, "fail"))
def test_gradients_that_the_script_scales_beside_others(others: float, status: str) -> None:
    """Experts of one rank have the sum of the ranks' gradients until the script divides it; a clip
    divides all of them.
    """
    two, one = (
        scaled(n, 1.0, 1.0, 1, grads={"w": vector(w), "e": vector(e)})
        for n, w, e in ((2, others, 2.0), (1, 1, 1))
    )
    for trace in two.traces:
        object.__setattr__(trace.of(Step)[0], "grads_at_step", {"w": vector(1.0), "e": vector(1.0)})
    assert judge(SCALE, two, full_precision=two, single=one).status == status


@cases("names, status", (("e", "f"), "pass"), (("e", "e"), "fail"))
def test_a_parameter_of_one_rank_has_no_copy_to_be_reduced_with(
    names: tuple[str, str], status: str
) -> None:
    ranks = []
    for size, name in enumerate(names, 1):
        plain = parameter(name, managed=False, sharded=False)
        grads = {"w": vector(1.0), name: vector(float(size))}
        ranks.append(
            [
                {"kind": "shard", "modules": [""], "parameters": []},
                model(parameter(), plain),
                micro(),
                step(1, grads),
                stepped(),
            ]
        )
    assert judge("root-not-wrapped", *ranks).status == status


def divided(factor: float) -> Run:
    return scaled(
        2,
        1.0,
        2.0,
        1,
        extra=[{"kind": "divide", "factor": factor, "at_line": replace(LINE, line=5)}],
    )


BETWEEN = scaled(2, 1.0, 1.0, 1)
for one in BETWEEN.traces:
    object.__setattr__(one.of(Step)[0], "grads_at_step", {"w": vector(2.0)})
test_the_line_of_a_factor = judged_as(
    row(SCALE, "fail", divided(1.0), single=ALONE, at=replace(LINE, line=5)),
    row(
        SCALE, "fail", divided(3.0), single=ALONE, at=replace(LINE, line=10)
    ),  # it does not explain the ratio
    row(
        SCALE, "fail", BETWEEN, single=ALONE, at=replace(LINE, line=20)
    ),  # between backward and step
)


@cases(
    "text, line",
    ("def main():\n    loss = model(x) / world\n    loss.backward()", 2),
    ("def main():\n    loss = model(x)\n    loss /= world\n    log(loss)\n    loss.backward()", 3),
    (
        (
            "def main():\n    loss = model(x) * 2\n    total = loss / 2\n   "
            " accelerator.backward(loss)"
        ),
        2,
    ),
    ("def other():\n    loss = f(x) / 2\n\ndef main():\n    loss.backward()", 5),
)
def test_the_line_is_that_where_the_loss_is_scaled(text: str, line: int) -> None:
    two = scaled(2, 1.0, 2.0, 1)
    for trace in two.traces:
        for record in trace.of(Micro):
            object.__setattr__(record, "at_line", replace(LINE, line=len(text.splitlines())))
    found = judge(SCALE, two, single=ALONE, sources=Sources({LINE.file: text}, (LINE.file,)))
    assert (found.status, (found.location or LINE).line) == ("fail", line)


# -- what a resume does not bring back is reported where the resumed run loads


@cases(
    "rule, resumed",
    ("resume-is-exact", {}),
    ("load-without-set", {"weights": {"w": C}}),
    ("scheduler-or-progress-not-restored", {"lr": [0.2]}),
    ("reshard-keeps-trajectory", {"weights": {"w": C}}),
)
def test_the_load_is_named(rule: str, resumed: dict[str, Any]) -> None:
    load = {"kind": "checkpoint", "op": "load", "after_step": 0, "at_line": replace(LINE, line=40)}
    first = [model(), micro(), step(), stepped(), SAVE]
    train = run([*first, micro(2, rows=(1, 2)), step(2), stepped(2, weights={"w": B})])
    again = [model(), load, micro(rows=(1, 2)), step(**resumed), stepped(1, weights={"w": A})]
    runs = {"resume": run(again, role="resume"), "reshards": (run(again, role="reshard"),)}
    found = judge(rule, train, resume_full_precision=train, **runs)
    assert (found.status, found.location) == ("fail", replace(LINE, line=40))


def sampled(*steps: tuple[range, range], losses: tuple[float, ...] = ()) -> Run:
    ranks: list[list[dict[str, Any]]] = []
    for rank in range(2):
        rows: list[dict[str, Any]] = [model()]
        for k, own in enumerate(steps, 1):
            rows += [
                micro(k, losses[k - 1] if losses else 1.0, tuple(own[rank])),
                step(k),
                stepped(k),
            ]
        ranks.append(rows)
    return run(*ranks)


def offset(by: int, every: int = 32, size: int = 16) -> list[tuple[range, range]]:
    """Slices of four steps, of which that of rank 1 begins `by` samples behind that of rank 0."""
    starts = [every * k for k in range(4)]
    return [(range(s, s + size), range(s + by, s + by + size)) for s in starts]


FIRST, THEN, MORE = range(8), range(8, 16), range(16, 24)
ONE, TWO, THREE, FOUR, FIVE = (range(k, k + 1) for k in range(1, 6))
# No rank trains on another's samples in any step; what chance gives, or reaches no gradient, is no
# fault.
test_same_data = judged_as(
    row("same-data-on-every-rank", "fail", sampled((FIRST, THEN), (MORE, MORE))),
    row("same-data-on-every-rank", "fail", sampled((MORE, MORE), (FIRST, THEN))),
    row("same-data-on-every-rank", "pass", sampled((FIRST, THEN), (THEN, MORE))),
    row("same-data-on-every-rank", "fail", sampled(*offset(1)), names=("15 of their 16",)),
    row("same-data-on-every-rank", "pass", sampled(*offset(16))),
    row("same-data-on-every-rank", "pass", sampled(*offset(1, every=0))),  # again in each step
    row(
        "same-data-on-every-rank", "fail", sampled((ONE, ONE), (TWO, TWO))
    ),  # every step, however small
    row(
        "same-data-on-every-rank", "inconclusive", sampled((ONE, TWO), (THREE, THREE), (FOUR, FIVE))
    ),  # by chance
    row(
        "same-data-on-every-rank", "pass", sampled((FIRST, THEN), (MORE, MORE), losses=(1.0, 0.0))
    ),  # a dummy batch
)
