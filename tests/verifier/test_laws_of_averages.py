"""Averages of weights, weights that are replaced and restored, frozen weights, constant buffers: on
recorded traces and on tensors.
"""

from dataclasses import replace
from typing import Any

import torch
from test_laws import of, state, steps, tensor
from torch import nn

from records import (
    LINE,
    Recorder,
    cases,
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
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.finding import Finding
from verified_fsdp2.verifier.judging.all_findings import confirmed, with_consequences
from verified_fsdp2.verifier.probe.compat.groups import Slot
from verified_fsdp2.verifier.probe.dispatcher import Call
from verified_fsdp2.verifier.probe.events.restored_weights import Swaps
from verified_fsdp2.verifier.trace.events import OntoItself, Place, PutBack


def coarse(*lost: float | None) -> list[dict[str, Any]]:
    """An average of 16 bits, whose changes left these shares of its elements as they were."""
    changes = [state(k, main__mean=tensor(float(k), lost=share)) for k, share in enumerate(lost, 1)]
    return [
        one
        for k, change in enumerate(changes, 1)
        for one in (change, micro(k), step(k), stepped(k))
    ]


LOW = "average-in-low-precision"
test_averages_of_16_bits = judged_as(
    row(LOW, "fail", of(coarse(None, 0.9, 0.8)), at=LINE, names=("main.mean", "90%")),
    row(LOW, "pass", of(coarse(None, 0.0, 0.1))),  # a cast of the weights
    row(LOW, "pass", of(coarse(None, 0.9))),  # a single change says little
    row(LOW, "not_applicable", of(coarse(None, None))),
)


def sketch(size: float) -> list[float]:
    return [size * size, size, 0.0, 0.0, 0.0]


def followed(
    buffer_of_the_average: float, held: tuple[str, ...] = ("w",), text: str = ""
) -> Evidence:
    """A root and one whose weights follow; the buffer of the first one moves."""
    buffer = {"name": "mean", "shape": [4], "unset": 0}
    roots = [
        model(parameter("w"), buffers=[buffer]),
        model(parameter("model1.w"), root="model1.", buffers=[{**buffer, "name": "model1.mean"}]),
    ]
    records = list(roots)
    for k in range(1, 4):
        mine = tensor(1.0 + (k - 1) * buffer_of_the_average, "module")
        records += [state(k, model__mean=tensor(float(k), "module"), model1__mean=mine), micro(k)]
        records += [
            step(k, weights={"w": sketch(k), "model1.w": sketch(2.0 * k)}, held=list(held)),
            stepped(k),
        ]
    made = run(records, records)
    return Evidence(
        train=made, full_precision=made, sources=Sources({"train.py": text}, ("train.py",))
    )


AVERAGE = "average-without-buffers"
test_buffers_of_an_average = judged_as(
    row(AVERAGE, "fail", followed(0.0), names=("model1.mean",)),
    row(AVERAGE, "pass", followed(1.0)),
    row(AVERAGE, "pass", followed(0.0, text="update_bn(loader, average)")),
    row(
        AVERAGE, "not_applicable", followed(0.0, held=("w", "model1.w"))
    ),  # a second model that is trained
)


def frozen(*bases: float, lora: float = 0.0) -> list[dict[str, Any]]:
    """Before each step the frozen weight has these values; `lora`: what the script adds to the
    trained one at the same time.
    """
    records: list[dict[str, Any]] = []
    for k, base in enumerate(bases, 1):
        last, beside = bases[max(k - 2, 0)], 1.0 * k
        begins = {
            "l.base.weight": sketch(base),
            "l.up": sketch(beside + (lora if base != last else 0.0)),
        }
        records += [micro(k), step(k, weights=begins, held=["l.up"])]
        records += [
            stepped(k, weights={"l.base.weight": sketch(base), "l.up": sketch(beside + 1.0)})
        ]
    return records


SAME = "same-model-throughout"
test_frozen_weights = judged_as(
    row(SAME, "fail", of(frozen(1.0, 1.0, 2.0, 2.0)), names=("before step 3", "l.base.weight")),
    row(SAME, "pass", of(frozen(1.0, 1.0, 1.0, 1.0))),
    row(SAME, "pass", of(frozen(1.0, 1.0, 2.0, 2.0, lora=5.0))),  # adapters begin anew
    row(SAME, "pass", of(frozen(1.0, 2.0, 3.0, 4.0))),  # it follows something in each step
)

test_constant_buffers = judged_as(
    *(
        row(
            "state-same-on-ranks",
            status,
            *([state(1, **{name: tensor(x, "module")}), *steps()] for x in (1.0, other)),
        )
        for status, name, other in (
            ("fail", "model__scaler", 2.0),
            ("pass", "model__scaler", 1.0),
            ("pass", "main__env__table", 2.0),  # of no model
        )
    )
)


@cases(
    "began, held, status",
    (
        (1.0, 2.0),
        "model__table__sums",
        "pass",
    ),  # each rank has its part of the table, and sums beside it
    ((1.0, 2.0), "model__other__sums", "fail"),
    ((1.0, 1.0), "model__table__sums", "fail"),
)
def test_a_table_cut_by_the_script_carries_sums_of_its_part(
    began: tuple[float, ...], held: str, status: str
) -> None:
    def rank(begins: float, sums: float) -> list[Any]:
        table = parameter("table.w", managed=False, sharded=False, sketch=sketch(begins))
        before, after = (state(k, **{held: tensor(k * sums, "module")}) for k in (1, 2))
        return [model(parameter(), table), before, *steps(2), after]

    assert (
        judge(
            "state-same-on-ranks", of(*(rank(x, float(k)) for k, x in enumerate(began, 1)))
        ).status
        == status
    )


@cases(
    "tables, alone_then, status",
    ((1.0, 2.0), (5, 6), "fail"),
    ((1.0, 2.0), (3, 4), "pass"),
    ((1.0, 1.0), (5, 6), "pass"),
    (
        (1.0, 2.0),
        (7, 8),
        "pass",
    ),  # what a model makes has another hash for its rounding, and the same loss
)
def test_a_table_that_draws_the_samples(
    tables: tuple[float, float], alone_then: tuple[int, ...], status: str
) -> None:
    def trained(table: float, first: tuple[int, ...], then: tuple[int, ...]) -> list[Any]:
        tables = [
            state(number, main__miner__table=tensor(x, "object"))
            for number, x in ((1, 0.0), (2, table))
        ]
        made = [
            [
                micro(number, 2.0 if rows == (5, 6) else 1.0, rows=rows),
                step(number),
                stepped(number),
            ]
            for number, rows in ((1, first), (2, then))
        ]
        return [*steps(0), tables[0], *made[0], tables[1], *made[1]]

    ranks = [trained(table, (number,), (number + 2,)) for number, table in enumerate(tables, 1)]
    found = judge(
        "state-same-on-ranks",
        of(*ranks, single=run(trained(1.0, (1, 2), alone_then), role="single")),
    )
    assert (found.status, found.suspicion) == (status, status == "fail")


@cases(
    "mine, theirs, rows, status",
    (1.0, 1.7, (5, 6), "fail"),
    (1.0, 2.0, (5, 6), "inconclusive"),
    (1.0, 1.7, (1, 2), "pass"),
    (1.0, 1.0, (8, 9), "pass"),  # the same samples, padded otherwise: all numbers agree
)
def test_a_statistic_of_the_data(
    mine: float, theirs: float, rows: tuple[int, ...], status: str
) -> None:
    def trained(value: float, rows: tuple[int, ...]) -> list[Any]:
        begins = state(
            1, main__scaler__std=tensor(value, "object"), model__mean=tensor(1.0, "module")
        )
        later = [
            state(2, model__mean=tensor(2.0, "module")),
            micro(2, rows=(7,)),
            step(2),
            stepped(2),
        ]
        made = step(1, {"w": [1.0, 0.1 if rows == (5, 6) else 0.5, 0.0, 0.0, 0.0]})
        return [*steps(0), begins, micro(1, rows=rows), made, stepped(1), *later]

    single = run(
        [{"kind": "model", "starting_point": "loaded"}, *trained(theirs, rows)], role="single"
    )
    found = judge(
        "state-same-in-one-process", of(trained(mine, (1,)), trained(mine, (2,)), single=single)
    )
    assert found.status == status


@cases("digests, rows, status", ((1, 1), 4, "fail"), ((1, 2), 4, "pass"), ((1, 1), 2, "pass"))
def test_noise_that_all_ranks_draw_alike(digests: tuple[int, int], rows: int, status: str) -> None:
    def drawn(digest: int, rows: int) -> list[Any]:
        draws = [
            {
                "kind": "drawn",
                "step": k,
                "function": "randn",
                "shape": [rows, 3],
                "digest": k * digest,
            }
            for k in (2, 3)
        ]
        return [*steps(), *draws]

    found = judge(
        "same-noise-on-every-rank",
        of(*(drawn(digest, 2) for digest in digests), single=run(drawn(7, rows), role="single")),
    )
    assert found.status == status


def test_what_is_put_back_from_its_own_memory() -> None:
    records = [*steps(), {"kind": "put_back", "step": 2, "name": "w", "over": LINE}]
    found = judge("snapshot-is-a-copy", of(records, records))
    assert (
        found.status == "fail" and "their own memory" in found.evidence and found.location == LINE
    )


def test_an_average_of_the_weights_with_themselves() -> None:
    records = [
        *steps(),
        {"kind": "onto_itself", "step": 2, "name": "w", "op": "lerp_", "at_line": LINE},
    ]
    found = judge("snapshot-is-a-copy", of(records, records))
    assert found.status == "fail" and "with themselves" in found.evidence and found.location == LINE
    records[-1]["op"] = "copy_"
    assert (
        "puts 1 parameter (w) back from their own memory"
        in judge("snapshot-is-a-copy", of(records, records)).evidence
    )


class Session(Recorder):
    in_step, step = False, 3

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.progress = module, self

    def here(self) -> Place:
        return replace(LINE, file=__file__)

    def all_slots(self) -> list[Slot]:
        return [Slot(name, param) for name, param in self.module.named_parameters()]

    def step_number(self) -> int:
        return self.step


@cases(
    "copied, tried, stepped, found",
    (False, True, False, 2),
    (True, True, False, 0),
    (False, False, False, 0),  # nothing ran with the other weights
    (False, True, True, 0),
)
def test_the_probe_sees_weights_that_are_replaced(
    copied: bool, tried: bool, stepped: bool, found: int
) -> None:
    module = nn.Linear(3, 2)
    session = Session(module)
    swaps = Swaps(session)  # type: ignore[arg-type]
    swaps.forget()
    kept = [p.detach().clone() if copied else p.detach() for p in module.parameters()]
    with torch.no_grad():
        for param in module.parameters():
            swaps.copy(param, torch.ones_like(param))
            param.copy_(torch.ones_like(param))
        if tried:
            swaps.called()
        if stepped:
            swaps.forget()
        for param, value in zip(module.parameters(), kept, strict=True):
            swaps.copy(param, value)
    assert [type(event) for event in session.events] == [PutBack] * found


@cases(
    "op, own, alpha, found",
    ("lerp_", True, None, 2),
    ("_foreach_lerp_", True, None, 2),
    ("add_", True, 0.1, 2),
    ("add_", True, -0.1, 0),  # weight decay
    ("lerp_", False, None, 0),
)
def test_the_probe_sees_an_average_in_the_memory_of_the_weights(
    op: str, own: bool, alpha: float | None, found: int
) -> None:
    module = nn.Linear(3, 2)
    session = Session(module)
    swaps = Swaps(session)  # type: ignore[arg-type]
    swaps.forget()
    averages = [p.detach() if own else p.detach().clone() for p in module.parameters()]
    weights = [p.detach() for p in module.parameters()]
    options = {} if alpha is None else {"alpha": alpha}
    for _ in range(2):  # each parameter is reported once
        if op.startswith("_foreach"):
            swaps.averages(op)(Call((averages, weights, 0.1), {}))
        else:
            for average, weight in zip(averages, weights, strict=True):
                swaps.averages(op)(Call((average, weight), options))
    assert [(type(event), event.op) for event in session.events] == [(OntoItself, op)] * found


@cases(
    "own, other, steps, found",
    (True, False, 2, 2),
    (True, False, 1, 0),
    (True, True, 2, 0),  # the best of several models is copied to all of them
    (False, False, 2, 0),
)
def test_the_probe_sees_weights_put_back_from_their_own_memory(
    own: bool, other: bool, steps: int, found: int
) -> None:
    modules = [nn.Linear(3, 2) for _ in range(2)]
    session = Session(nn.ModuleList(modules))
    swaps = Swaps(session)  # type: ignore[arg-type]
    kept = [p.detach() if own else p.detach().clone() for p in modules[0].parameters()]
    with torch.no_grad():
        for number in range(1, steps + 1):
            swaps.forget()
            session.step = number
            for module in modules[: 1 + other]:
                for param, value in zip(module.parameters(), kept, strict=True):
                    swaps.copy(param, value)
    assert [
        (type(event), event.op) for event in session.events if isinstance(event, OntoItself)
    ] == [(OntoItself, "copy_")] * found


@cases(
    "beside, status",
    (Finding("state-restored", "pass", "x"), "inconclusive"),
    (Finding("root-only-wrap", "fail", "x", required=False), "inconclusive"),
    (Finding("reshard-keeps-trajectory", "fail", "x", suspicion=True), "inconclusive"),
    (Finding("matches-ddp", "fail", "x"), "fail"),
)
def test_a_suspicion_needs_another_failure(beside: Finding, status: str) -> None:
    found, _ = confirmed(
        [Finding("state-same-on-ranks", "fail", "other values", suspicion=True), beside],
        Evidence(),
    )
    assert found.status == status
    assert ("decide it by the code" in found.evidence) == (status == "inconclusive")


def test_what_another_rule_explains_is_its_consequence() -> None:
    names = (
        "per-rank-state-deduplicated",
        "scheduler-or-progress-not-restored",
        "load-without-set",
        "state-same-on-ranks",
    )
    found = with_consequences([Finding(name, "fail", "x") for name in names], Evidence())
    assert [finding.consequence for finding in found] == [True, True, False, False]
    # a file with shards of one rank explains what was loaded from it
    cause = Finding("local-shard-export", "fail", "x", explains=("load-without-set",))
    found = with_consequences([cause, Finding("load-without-set", "fail", "x")], Evidence())
    assert [finding.consequence for finding in found] == [False, True]


def test_what_a_resume_loses_explains_nothing_that_runs_without_one_show() -> None:
    names = ["state-restored", "resume-is-exact", "matches-ddp", "evaluation-same-in-one-process"]
    for cause, follows in (
        ([], [False, True, False, False]),
        (["optim-before-shard"], [False, True, True, True]),
    ):
        found = with_consequences(
            [Finding(name, "fail", "x") for name in (*names, *cause)], Evidence()
        )
        assert [finding.consequence for finding in found[:4]] == follows


def test_training_without_gradients_says_so() -> None:
    found = judge("matrix-optimizer-on-local-shard", [model()], [model()])
    assert found.status == "inconclusive" and "no backward ran" in found.evidence
