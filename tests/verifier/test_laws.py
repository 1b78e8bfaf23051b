"""The laws on recorded traces: a breach each, and what a right script does that looks like one."""

import math
from dataclasses import replace
from typing import Any

import pytest

from records import (
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
)
from verified_fsdp2.verifier.analysis.state import evaluated
from verified_fsdp2.verifier.config.watch import watched
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.rules import RULES
from verified_fsdp2.verifier.trace import Run

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


class Router(torch.nn.Module):
    def __init__(self):
        self.routed, self.average, self.seen = None, 0.0, 0.0

    def forward(self, x):
        self.routed = counts(x)
        self.average = (
            0.9 * self.average + self.routed
        )
        self.seen += 1
        return x
"""
A_FEW = [1.0, 0.5, 0.0, 0.0, 0.0]
BOTH = {name: [1.0, 0.5, 0.0, 0.0, 0.0] for name in "wvu"}
SOURCES = Sources({"train.py": LOOP}, ("train.py",))


def held(value: float | None = None, holder: str = "local", **more: Any) -> dict[str, Any]:
    return {"holder": holder, "value": value, "dtype": "float", **more}


def tensor(size: float, holder: str = "local", **more: Any) -> dict[str, Any]:
    return held(
        None, holder, sketch=[size * size, size, 0.0, 0.0, 0.0], numel=64, dtype="float32", **more
    )


def state(
    number: int, evaluations: int = 0, in_eval: tuple[str, ...] = (), **values: Any
) -> dict[str, Any]:
    paths = {name.replace("__", "."): value for name, value in values.items()}
    return {
        "kind": "state",
        "step": number,
        "values": paths,
        "evaluations": evaluations,
        "in_eval": list(in_eval),
    }


def steps(number: int = 3, **more: Any) -> list[dict[str, Any]]:
    return [
        one
        for k in range(1, number + 1)
        for one in (micro(k, rows=(k,)), step(k, **more), stepped(k))
    ]


def of(*ranks: list[dict[str, Any]], **more: Any) -> Evidence:
    made = run(*ranks)
    return Evidence(train=made, full_precision=made, sources=SOURCES, **more)


def kept(name: str) -> list[dict[str, Any]]:
    return [*steps(), {"kind": "kept_gradients", "step": 2, "names": [name]}]


def edited(**factors: float | None) -> list[dict[str, Any]]:
    return [*steps(), {"kind": "edited_gradients", "step": 1, "micro": 2, "factors": factors}]


def cleared(again: int) -> list[dict[str, Any]]:
    """Gradients are cleared between two micro-batches of a step, the second of the samples
    `again`.
    """
    records = []
    for k in range(1, 4):
        edit = {"kind": "edited_gradients", "step": k, "micro": 2, "factors": {"w": 0.0}}
        records += [micro(k, rows=(1,)), edit, micro(k, rows=(again,)), step(k), stepped(k)]
    return records


def idle(*grads: dict[str, Any]) -> list[dict[str, Any]]:
    return [micro(1), step(1, held=["w"]), stepped(1), step(2, *grads, held=["w"]), stepped(2)]


def left(*numbers: int) -> list[dict[str, Any]]:
    """A second optimizer uses, in these steps, gradients that were there when the first one
    stepped.
    """
    found = [
        {"kind": "leftover", "step": k, "optimizer": 1, "names": ["w"], "at_line": None}
        for k in numbers
    ]
    return [
        *steps(),
        *(one for k in range(1, 4) for one in (step(k, optimizer=1), stepped(k, optimizer=1))),
        *found,
    ]


DRY = [micro(1, rows=(9,)), {"kind": "cleared", "step": 1}, *steps()]
test_gradients_consumed_once = judged_as(
    *(
        row("gradients-consumed-once", status, of(*ranks))
        for status, *ranks in (
            ("fail", kept("w"), kept("w")),
            ("pass", kept("v"), steps()),  # those of another optimizer may wait
            ("fail", left(2, 3)),
            ("pass", left(1, 2, 3)),  # it is meant to add them up
            ("pass", left(3)),
            ("fail", edited(w=0.25, v=0.25), steps()),  # a clip between micro-batches
            ("pass", edited(w=0.25, v=None), steps()),  # surgery
            ("fail", *[cleared(2)] * 2),
            ("pass", *[cleared(1)] * 2),  # SAM, whose first gradients only show the way
            ("pass", DRY, DRY),  # a dry run may throw gradients away
            ("fail", *[idle()] * 2),
            (
                "pass",
                *[[micro(1), step(1, held=["w"]), stepped(1), step(2, held=["v"]), stepped(2)]] * 2,
            ),  # peers
            (
                "pass",
                *[[*idle()[:3], micro(1), *idle()[3:]]] * 2,
            ),  # a backward that another optimizer counts
            ("pass", *[idle({"w": [0.0] * 5})] * 2),
        )
    )
)


class TestRestored:
    rule = "state-restored"

    def both(
        self,
        then: dict[str, Any],
        now: dict[str, Any],
        first_rank: dict[str, Any] | None = None,
        loss: float = 1.0,
    ) -> Evidence:
        """`first_rank`: what rank 0 begins with after the resume, where that is not what rank 1
        does.
        """
        train = [*steps(4)[:6], SAVE, *steps(4)[6:]]
        first = {
            path: {**value, "value": -1.0} if value["value"] is not None else tensor(9.0)
            for path, value in then.items()
        }
        train = [state(1, **first), *train, state(3, **then)]
        ranks = (now if first_rank is None else first_rank, now)
        begun = [
            [micro(1, loss, rows=(3,)), step(1), stepped(1), state(1, **mine)] for mine in ranks
        ]
        return of(train, train, resume=run(*begun, role="resume"))

    @cases("name, then, now",
        ("ema", tensor(1.0), tensor(0.5)),
        ("main__best", held(0.5), held(9.0)),
        ("main__scheduler__last_epoch", held(2.0, "scheduler"), held(0.0, "scheduler")),
        ("model__running_mean", tensor(1.0, "module"), tensor(0.0, "module")))  # fmt: skip
    def test_what_is_lost(self, name: str, then: dict[str, Any], now: dict[str, Any]) -> None:
        found = judge(self.rule, self.both({name: then}, {name: now}))
        assert found.status == "fail"
        assert name.replace("__", ".") in found.evidence

    def test_what_is_lost_on_another_rank(self) -> None:
        then = {"main__buffer__items[0]": tensor(1.0, "object")}
        found = judge(
            self.rule, self.both(then, {"main__buffer__items[0]": tensor(0.5, "object")}, then)
        )
        assert (found.status, "`main.buffer.items[0]` on rank 1" in found.evidence) == (
            "fail",
            True,
        )

    @cases("name, now, words",
        ("main__geco__average", {"main__geco__average": held(0.0, "object")},
         "`main.geco.average` = 0 instead of 2"),
        ("main__geco__average", {}, "`main.geco.average` = nothing instead of 2"),
        ("main__noise", {"main__noise": held(0.0, "generator")}, "the state of `main.noise`"),
        ("main__start", {"main__start": held(2.0)}, ""))  # fmt: skip
    def test_an_inexact_resume_names_what_objects_begin_with(
        self, name: str, now: dict[str, Any], words: str
    ) -> None:
        kind = {"main__start": "local", "main__noise": "generator"}.get(name, "object")
        evidence = self.both({name: held(2.0, kind)}, now, loss=0.5)
        found = judge("resume-is-exact", evidence)
        assert (found.status, "begins there with" in found.evidence) == ("fail", bool(words))
        assert words in found.evidence and judge(self.rule, evidence).status != "fail"

    @cases("later, status", (tensor(4.0, "module"), "pass"), (tensor(3.5, "module"), "fail"))
    def test_what_each_forward_sets_again(self, later: dict[str, Any], status: str) -> None:
        values = [state(k, model__load=tensor(float(k), "module")) for k in range(1, 5)]
        train = [*steps(4)[:6], SAVE, *steps(4)[6:], *values]
        resumed = []
        for k, held_now in ((1, tensor(0.0, "module")), (2, later)):
            resumed += [
                micro(k, rows=(k + 2,)),
                step(k),
                stepped(k),
                state(k, model__load=held_now),
            ]
        assert (
            judge(self.rule, of(train, train, resume=run(resumed, resumed, role="resume"))).status
            == status
        )

    @cases("then, now, status",
        ((1.0, 0.0, 0.0, 0.0), (1.0, 0.0), "pass"),  # a process has begun
        ((1.0, 0.0, 0.0, 0.0), (1.0, 1.0), "fail"),
        ((1.0, 2.0, 3.0, 4.0), (1.0, 2.0), "fail"))  # fmt: skip
    def test_a_number_of_the_first_step_alone(
        self, then: tuple[float, ...], now: tuple[float, ...], status: str
    ) -> None:
        path = "main__best"
        values = [state(k, **{path: held(v)}) for k, v in enumerate(then, 1)]
        train = [*steps(4)[:6], SAVE, *steps(4)[6:], *values]
        resumed = [
            one
            for k, v in enumerate(now, 1)
            for one in (
                *(micro(k, rows=(k + 2,)), step(k), stepped(k)),
                state(k, **{path: held(v)}),
            )
        ]
        both = of(train, train, resume=run(resumed, resumed, role="resume"))
        assert judge(self.rule, both).status == status

    @cases("rate, status", (0.4, "pass"), (0.1, "fail"))
    def test_a_schedule_that_counts_on_otherwise(self, rate: float, status: str) -> None:
        """`last_epoch` is another one: the learning rates decide."""
        path = "main__schedule__last_epoch"
        train: list[Any] = []
        for k in range(1, 5):
            count = state(k, **{path: held(float(k), "scheduler")})
            train += [micro(k, rows=(k,)), step(k, lr=[0.1 * k]), stepped(k), count]
            train += [SAVE] if k == 2 else []
        resumed = []
        for k, lr in ((1, 0.1 * 3), (2, rate)):
            count = state(k, **{path: held(float(k), "scheduler")})
            resumed += [micro(k, rows=(k + 2,)), step(k, lr=[lr]), stepped(k), count]
        both = of(train, train, resume=run(resumed, resumed, role="resume"))
        assert judge(self.rule, both).status == status

    @pytest.mark.parametrize("name", ["main__seen", "main__running_loss", "main__started"])
    def test_what_only_a_log_reads_may_start_again(self, name: str) -> None:
        assert (
            judge(self.rule, self.both({name: held(2.0)}, {name: held(0.0)})).status
            == "not_applicable"
        )

    def test_what_comes_back(self) -> None:
        assert (
            judge(self.rule, self.both({"ema": tensor(1.0)}, {"ema": tensor(1.0)})).status == "pass"
        )

    @pytest.mark.parametrize(("later", "status"), [(5.0, "fail"), (4.0, "pass")])
    def test_what_is_made_of_it_steps_later(self, later: float, status: str) -> None:
        """The average is restored, and parts from that of the run that went on: its number of
        updates was not.
        """
        all_steps = steps(5)
        values = [
            state(k, main__ema__shadow=tensor(float(k)), main__ema__updates=held(float(k)))
            for k in range(1, 6)
        ]
        train = [
            one for k, value in enumerate(values) for one in (*all_steps[3 * k : 3 * k + 3], value)
        ]
        train[8:8] = [SAVE]
        resumed = []
        for k, size in ((3, 3.0), (4, later), (5, 5.0)):
            now = state(
                k - 2,
                main__ema__shadow=tensor(size),
                main__ema__updates=held(size if status == "pass" else k - 2.0),
            )
            resumed += [micro(k - 2, rows=(k,)), step(k - 2), stepped(k - 2), now]
        found = judge(self.rule, of(train, train, resume=run(resumed, resumed, role="resume")))
        assert found.status == status
        assert ("main.ema.updates" in found.evidence) is (status == "fail")

    def test_the_state_was_not_recorded(self) -> None:
        resumed = run([micro(1), step(1), stepped(1)], role="resume")
        assert (
            judge(self.rule, of([*steps(4)[:6], SAVE, *steps(4)[6:]], resume=resumed)).status
            == "inconclusive"
        )


MOMENTS = (tensor(1.0, "optimizer"), tensor(2.0, "optimizer"))
NORMS = (held(1.0, "optimizer"), held(2.0, "optimizer"))


def two(
    name: str,
    a: dict[str, Any],
    b: dict[str, Any],
    began: float = 0.0,
    of_model: tuple[dict[str, Any], ...] = (),
) -> Evidence:
    """Two ranks of which the second begins with a number that is `began` larger."""
    first = (
        [held(-1.0), held(began - 1.0)]
        if a["value"] is not None
        else [tensor(9.0, a["holder"])] * 2
    )
    pairs = zip(first, (a, b), strict=True)
    return of(
        *[
            [*of_model, *steps(), state(1, **{name: old}), state(3, **{name: new})]
            for old, new in pairs
        ]
    )


def running(mean: int) -> list[dict[str, Any]]:
    """Running statistics that differ from the first forward on."""
    return [
        *steps(),
        state(1, model__mean=tensor(mean, "module")),
        state(3, model__mean=tensor(3.0 * mean, "module")),
    ]


test_state_same_on_ranks = judged_as(
    *(
        row("state-same-on-ranks", status, evidence)
        for status, evidence in (
            ("fail", two("model__mean", tensor(1.0, "module"), tensor(2.0, "module"))),
            ("fail", two("main__best", held(1.0), held(2.0))),
            ("pass", two("model__mean", tensor(1.0, "module"), tensor(1.0, "module"))),
            ("fail", of(running(1), running(2))),
            (
                "pass",
                two("model__mean", tensor(1.0, "module"), {**tensor(2.0, "module"), "numel": 32}),
            ),  # a cache for its own samples
            (
                "pass",
                two("main__best", held(1.0), held(2.0), began=1.0),
            ),  # a position differs from the first step on
            (
                "fail",
                two("main__scale", tensor(1.0, "parameter"), tensor(2.0, "parameter")),
            ),  # outside of every model
            ("pass", two("main__batch", tensor(1.0), tensor(2.0))),
            (
                "pass",
                two("model__routed", tensor(1.0, "module"), tensor(2.0, "module")),
            ),  # of the last call alone
            ("fail", two("model__average", tensor(1.0, "module"), tensor(2.0, "module"))),
            ("fail", two("model__seen", tensor(1.0, "module"), tensor(2.0, "module"))),
            ("pass", two("main__loss", held(1.0), held(2.0))),
            # moments that an optimizer keeps in a list of its own, for shards and for replicas
            ("pass", two("main__opt__momenta", *MOMENTS, of_model=(model(parameter()),))),
            ("fail", two("main__opt__momenta", *MOMENTS)),
            ("fail", two("main__opt__norm", *NORMS, of_model=(model(parameter()),))),
            ("not_applicable", of(steps())),  # one rank
        )
    )
)


@cases("path, suspicion", ("model__mean", False), ("model__last[0]", True))
def test_what_ranks_keep_in_lists_may_be_meant(path: str, suspicion: bool) -> None:
    found = judge("state-same-on-ranks", two(path, tensor(1.0, "module"), tensor(2.0, "module")))
    assert (found.status, found.suspicion) == ("fail", suspicion)


test_same_model_throughout = judged_as(
    *(
        row("same-model-throughout", status, of(records, records))
        for status, records in (
            (
                "fail",
                [*steps(), state(1), state(2, evaluations=1, in_eval=("",))],
            ),  # eval mode is left on
            (
                "pass",
                [*steps(), state(1, in_eval=("norm",)), state(2, evaluations=1, in_eval=("norm",))],
            ),  # it always is
            (
                "fail",
                [*steps(), step(1, optimizer=1), stepped(1, optimizer=1)],
            ),  # two optimizers hold one parameter
            (
                "pass",
                [micro(1), step(1), step(1, optimizer=1), stepped(1, optimizer=1), stepped(1)],
            ),  # one in another
            (
                "fail",
                [record for k in range(1, 5) for record in (step(k, BOTH, held=["w"]), stepped(k))],
            ),
            (
                "pass",
                [
                    record
                    for k in range(1, 5)
                    for record in (step(k, BOTH, held=["wvu"[k // 3]]), stepped(k))
                ],
            ),  # turns
            (
                "pass",
                [
                    record
                    for k in range(1, 9)
                    for record in (step(k, BOTH, held=["wv"[k > 2]]), stepped(k))
                ],
            ),  # phases
            (
                "fail",
                [
                    record
                    for k in range(1, 9)
                    for record in (step(k, BOTH, held=["wv"[k % 2]]), stepped(k))
                ],
            ),  # a pair
        )
    )
)


def alone(rank: list[dict[str, Any]]) -> Run:
    """One process with the samples of two such ranks."""
    rows = [{**r, "rows": r["rows"] * 2} if r["kind"] == "micro" else r for r in rank]
    return run([{"kind": "model", "starting_point": "loaded"}, *rows], role="single")


def averaging(value: float) -> list[dict[str, Any]]:
    return [*steps(), state(1, main__average=tensor(0.5)), state(2, main__average=tensor(value))]


def alone_on(sharded: bool) -> list[dict[str, Any]]:
    values = (tensor(size, sharded=sharded) for size in (0.5, 1.5))
    return [*steps(), *(state(k, main__average=value) for k, value in enumerate(values, 1))]


def keeping(path: str, live: bool) -> list[dict[str, Any]]:
    return [*steps(), {**state(2), "values": {path: tensor(1.0, live=live)}}]


REPLACED = {"kind": "replaced_read", "name": "w", "by": "norm", "step": 1}


def square(value: float) -> list[float]:
    """The sketch of a gradient by the square of its norm."""
    return [value, 0.0, 0.0, 0.0, 0.0]


KEPT, READ, MEAN = "snapshot-is-a-copy", "replaced-parameter-read", "gradient-of-mean-loss"
SAME = [one for k in range(1, 5) for one in (micro(k, rows=(7,)), step(k), stepped(k))]


def chunked(weight: float) -> list[dict[str, Any]]:
    """The cross entropies of four chunks of 4 targets, with 10 that count: together `weight` times
    their mean.
    """
    return [{**entropy(valid, weight / 10, "sum")[0], "targets": 4} for valid in (4, 4, 2, 0)]


test_the_status = judged_as(
    *(  # a tensor beside the weights: what differs between ranks is data of theirs
        row(
            "state-same-in-one-process",
            status,
            of(averaging(a), averaging(b), single=alone(averaging(1.0))),
        )
        for a, b, status in ((1.5, 1.5, "fail"), (1.0, 1.0, "pass"), (1.5, 2.0, "not_applicable"))
    ),
    row(  # a list of shards that rank 0 alone holds is no whole tensor
        "state-same-in-one-process",
        "not_applicable",
        of(alone_on(True), steps(), single=alone(averaging(1.0))),
    ),
    row(  # as it is if all ranks hold theirs
        "state-same-in-one-process",
        "fail",
        of(alone_on(True), alone_on(True), single=alone(averaging(1.0))),
    ),
    row(
        "state-same-in-one-process",
        "pass",
        of(averaging(-1.0), averaging(-1.0), single=alone(averaging(1.0))),
    ),  # a queue
    row(
        KEPT, "fail", of(keeping("main.kept['w']", True))
    ),  # weights that are kept under a comparison
    row(KEPT, "pass", of(keeping("main.kept['w']", False))),
    row(KEPT, "not_applicable", of(keeping("main.shards[0]", True))),  # other variables may be live
    row(READ, "fail", of([*steps(), REPLACED], steps())),
    row(READ, "pass", of(steps(), steps())),
    *(  # the sum of micro-batches, and their mean
        row(
            MEAN,
            status,
            of(
                *[[micro(1, loss / 2, criteria=entropy(4, loss / 2))] * 2 + [step(1), stepped(1)]]
                * 2
            ),
        )
        for loss, status in ((2.0, "fail"), (1.0, "pass"))
    ),
    *(  # the same with the losses multiplied by a GradScaler, and the gradients divided at the step
        row(
            MEAN,
            status,
            of(
                *[
                    [micro(1, 65536.0 * loss / 2, criteria=entropy(4, 65536.0 * loss / 2))] * 2
                    + [step(1, {"w": square(65536.0**2)}, grads_at_step={"w": square(1.0)})]
                    + [stepped(1)]
                ]
                * 2
            ),
        )
        for loss, status in ((2.0, "fail"), (1.0, "pass"))
    ),
    *(  # one cross entropy in chunks of which one has no target, and heads on the same tokens
        row(
            MEAN,
            status,
            of(*[[micro(1, criteria=chunked(weight), tokens=tokens), step(1), stepped(1)]] * 2),
        )
        for weight, tokens, status in (
            (2.0, 16, "fail"),
            (1.0, 16, "pass"),
            (1.0, 8, "not_applicable"),
        )
    ),
    *(
        row("same-samples-every-step", status, of(*[[*loader, *SAME]] * 2))
        for loader, status in (
            ([{"kind": "loader_started", "samples": 64, "step": 1}], "fail"),
            ([{"kind": "loader_started", "samples": 1, "step": 1}], "pass"),
            ([], "not_applicable"),
        )
    ),
)


PUSHED = """
def main():
    if options.resume:
        last = newest()
        load(last)
    for step in range(9):
        loss_of(model).backward()
        optimizer.step()
        if step > 3:
            last = model.state_dict()
            save(last)
        with torch.no_grad():
            total = loss_of(model)
        print(total / world)

class Window:
    def push(self, model):
        self.window.append(model.state_dict())

    def mean(self):
        return sum(self.window)
"""
WINDOW = {"values": {"main.window.window[0]['w']": tensor(1.0, live=True)}}


@cases(
    "status, records",
    ("fail", [state(1), {**state(2), **WINDOW}]),
    (
        "not_applicable",
        [{**state(1), **WINDOW}, state(2)],
    ),  # of a list that was made before training
    ("not_applicable", keeping("main.last['w']", True)[-1:]),  # read where it was assigned
)
def test_what_is_appended_while_training_goes_on(
    status: str, records: list[dict[str, Any]]
) -> None:
    evidence = of([*steps(), *records])
    found = judge(KEPT, replace(evidence, sources=Sources({"train.py": PUSHED}, ("train.py",))))
    assert found.status == status


@cases("mine, status", (2.0, "pass"), (1.0, "pass"), (1.5, "fail"))
def test_a_sum_over_ranks_that_is_divided_where_it_is_read(mine: float, status: str) -> None:
    ranks = [
        [*steps(), state(1), state(2, evaluations=1, main__total=held(v))] for v in (mine, 1.0)
    ]
    evidence = of(ranks[0], ranks[0], single=alone(ranks[1]))
    pushed = Sources({"train.py": PUSHED}, ("train.py",))
    assert (
        judge("evaluation-same-in-one-process", replace(evidence, sources=pushed)).status == status
    )


@cases(
    "theirs, texts, status",
    (2.0, ["best"], "fail"),  # ranks hold other values
    (1.0, ["best"], "pass"),
    *(
        (2.0, [text], "inconclusive") for text in ("best rank-local", "best across=resume")
    ),  # no other run holds it
    *((1.0, [text], "inconclusive") for text in ("other", "bes")),  # it is nowhere
    (1.0, [], "not_applicable"),
)
def test_watched_values(theirs: float, texts: list[str], status: str) -> None:
    ranks = [
        [*steps(), {**state(1), "values": {"watch best": held(v, "watch")}}] for v in (1.0, theirs)
    ]
    assert (
        judge("watched-values-agree", of(*ranks, watch=tuple(map(watched, texts)))).status == status
    )


TIMER = """
class Metrics:
    def begin(self):
        self.started = time.perf_counter()

    def end(self):
        lasted = time.perf_counter() - self.started
        self.seconds += {value}
        if self.seconds:
            write(self.seconds)
            self.seconds = 0.0
"""


@cases("value, status", ("lasted", "pass"), ("loss", "fail"))
def test_a_timer_is_no_state(value: str, status: str) -> None:
    first = state(1, main__metrics__seconds=held(0.1, "object"))
    ranks = [
        [*steps(), first, state(2, main__metrics__seconds=held(v, "object"))] for v in (0.5, 0.3)
    ]
    sources = Sources({"train.py": TIMER.replace("{value}", value)}, ("train.py",))
    assert judge("state-same-on-ranks", replace(of(*ranks), sources=sources)).status == status


def test_a_training_loss_is_no_evaluation() -> None:
    records = [
        *steps(),
        state(1),
        state(2, evaluations=1, main__loss=held(1.0), train_step__loss=held(1.0)),
    ]
    assert evaluated(run(records), SOURCES) == set()
    assert judge("evaluation-same-in-one-process", of(steps(), steps())).status == "not_applicable"


@cases("mine, status, measured", (1.5, "fail", 1 / 3), (1.0, "pass", None))
def test_another_value_in_one_process(mine: float, status: str, measured: float | None) -> None:
    ranks = [
        [*steps(), state(1), state(2, evaluations=1, main__value=held(v))] for v in (mine, 1.0)
    ]
    found = judge("evaluation-same-in-one-process", of(ranks[0], ranks[0], single=alone(ranks[1])))
    assert found.status == status and (
        measured is None or found.measured == pytest.approx(measured)
    )


@cases("losses, samples", ((1.0, 1.0), 4), ((1.0, 2.0), 2))
def test_a_whole_graph_on_every_rank_counts_once(losses: tuple[float, float], samples: int) -> None:
    ranks = [[*steps(0), micro(1, loss, rows=(1, 2)), step(1), stepped(1)] for loss in losses]
    assert run(*ranks).global_batch(1).total() == samples


@cases("rows, same", ((1, 2), True), ((1, 1, 2, 2), True), ((1, 2, 2, 2), False))
def test_what_every_rank_is_given_is_one_graph_or_a_part_of_each_group(
    rows: tuple[int, ...], same: bool
) -> None:
    ranks = [[*steps(0), micro(1, loss, rows=(1, 2)), step(), stepped()] for loss in (1.0, 2.0)]
    single = run([*steps(0), micro(rows=rows), step(), stepped()], role="single")
    assert run(*ranks).same_batch(1, single) is same


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.family == "laws"])
def test_no_run_and_no_steps(name: str) -> None:
    assert judge(name, Evidence(missing={"train": "not run"})).status == "inconclusive"
    assert judge(name, of([], [])).status == "inconclusive"


@cases(
    "whole, same",
    ({"rows": (1, 2), "parts": [[32.0, 8.0, 20.0]]}, True),
    ({"rows": (1, 2), "parts": [[32.0, 8.0, 20.1]]}, False),  # other numbers
    ({"rows": (1, 2), "parts": [[16.0, 8.0, 20.0]]}, False),
    ({"rows": (1, 2, 3), "parts": [[32.0, 8.0, 20.0]]}, False),  # no parts of them
)
def test_ranks_that_have_parts_of_the_same_samples(whole: dict[str, Any], same: bool) -> None:
    """physicsnemo@0c831355c5: each rank has a slab of each field."""
    slabs = [[micro(rows=(10 + k, 20 + k), parts=[[16.0, 4.0, 10.0 + k * 1e-12]])] for k in (1, 2)]
    assert run(*slabs).same_batch(1, run([micro(**whole)], role="single")) is same
    assert not run(*slabs).same_batch(1, run([micro(rows=(1, 2))], role="single"))
    twice = run(*slabs, *slabs)  # the ranks of tensor parallelism are given the same parts
    assert twice.same_batch(1, run([micro(**whole)], role="single")) is same


NAN = float("nan")


@cases(
    "losses, weights, status, words",
    ((1.0, 2.0, NAN), A_FEW, "pass", ""),  # one, which a guard may leave out
    ((1.0, NAN, 2.0, 1.0), A_FEW, "pass", ""),
    ((1.0, NAN, NAN, NAN), A_FEW, "fail", "from step 2 to the last one: the weights before"),
    ((NAN, NAN, NAN), [NAN], "fail", "not finite before step 1"),
    ((1.0, math.inf, NAN), [NAN], "fail", "the update of step 1 makes the weights so"),
)
def test_losses_that_are_no_numbers(
    losses: tuple[float, ...], weights: list[float], status: str, words: str
) -> None:
    records = [
        one
        for k, loss in enumerate(losses, 1)
        for one in (micro(k, loss), step(k, weights={"w": weights}), stepped(k))
    ]
    found = judge("loss-stays-finite", of(records))
    assert found.status == status and words in found.evidence
