"""The rules on precision, clipping, gradients, data and optimizers that were added on records of
their own.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from records import (
    LINE,
    cases,
    judge,
    judged_as,
    micro,
    model,
    parameter,
    row,
    run,
    sources,
    step,
    stepped,
    stopped,
)
from scripts import written
from verified_fsdp2.verifier.evidence import Course, Sources
from verified_fsdp2.verifier.finding import Finding, Hit
from verified_fsdp2.verifier.probe.events.precision import lost_whole_numbers
from verified_fsdp2.verifier.source.lines import find_shard_use
from verified_fsdp2.verifier.source.project import Files
from verified_fsdp2.verifier.trace import Run

Records = list[dict[str, Any]]
BASE = [micro(), step(), stepped()]
PLAIN = [model(), *BASE]
STEP_2 = [micro(2), step(2), stepped(2)]


def shard(low: str | None = "bfloat16", **more: Any) -> dict[str, Any]:
    return {
        "kind": "shard",
        "parameters": [],
        "param_dtype": low,
        "reduce_dtype": "float32",
        **more,
    }


@cases(
    "values, lost",
    ([1.0, 257.0, 1001.0], (2, 257.0, 256.0)),
    ([0.0, 256.0, 512.0], None),  # bfloat16 holds these
    ([0.5, 257.3, 1000.1], None),  # no whole numbers: an activation
    ([0.0, -10000.0], None),  # an additive mask
    ([0.0, float("inf")], None),
    ([3.0e38, 0.0], None),  # beyond what float32 counts
)
def test_whole_numbers_that_a_cast_changes(
    values: list[float], lost: tuple[int, float, float] | None
) -> None:
    assert lost_whole_numbers(torch.tensor(values), torch.bfloat16) == lost


def test_other_tensors_are_left_alone() -> None:
    positions = torch.arange(2000, dtype=torch.float32)
    for other in (positions.long(), positions.requires_grad_(), torch.empty(0)):
        assert lost_whole_numbers(other, torch.bfloat16) is None
    assert lost_whole_numbers(torch.tensor([257.0]), torch.float16) is None
    assert lost_whole_numbers(torch.tensor([2049.0]), torch.float16) == (1, 2049.0, 2048.0)


def scaled(factor: float) -> Records:
    """A step whose gradients were `factor` times as large before it."""
    grads = {"w": [factor**2, factor, 0.0, 0.0, 0.0]}
    return [
        shard("float16"),
        model(),
        micro(),
        step(grads=grads, grads_at_step={"w": [1.0, 1.0, 0, 0, 0]}),
        stepped(),
    ]


def begin(epoch: int = 0, **more: Any) -> dict[str, Any]:
    base = {
        "kind": "sampler",
        "cls": "S",
        "dataset": 0,
        "epoch": epoch,
        "shuffle": True,
        "seed": 0,
        "samples": 8,
    }
    return {**base, **more}


def between(*records: dict[str, Any]) -> Records:
    """What a rank records whose sampler begins, and `records` after its second batch."""
    return [model(), begin(), *BASE, micro(2), *records, micro(3)]


def recomputed(*same: bool) -> Records:
    return [
        model(),
        *({"kind": "recompute", "same": one, "place": "model.py, Block.forward"} for one in same),
        *BASE,
    ]


def stream(*states: int | tuple[int, bool]) -> Records:
    """The generator's state after each step; a pair where it was set since the last one: in an
    evaluation?
    """
    pairs = [one if isinstance(one, tuple) else (one, None) for one in states]
    at = [
        {"at_line": None} if quiet is None else {"at_line": LINE, "evaluating": quiet}
        for _, quiet in pairs
    ]
    made = [
        {"kind": "random_stream", "step": n + 1, "state": state, **at[n]}
        for n, (state, _) in enumerate(pairs)
    ]
    return [*PLAIN, *made]


def master(dtype: str, **more: Any) -> Records:
    return [shard(), model(parameter(dtype=dtype)), micro(), step(**more), stepped()]


LOSSY, FP16, PARTIAL = "cast-forward-inputs-lossy", "fp16-without-scaler", "grad-norm-item-partial"
SURVIVE, RESYNC, CLEARED = (
    "unsynced-grads-survive-zero-grad",
    "accum-never-resynced",
    "zero-grad-while-unsharded",
)
EPOCH, DRAWS, REDUCE = (
    "set-epoch-missing",
    "recompute-draws-anew",
    "reduce-dtype-follows-param-dtype",
)
CAST = {"kind": "lossy_cast", "cls": "Block", "shape": [4], "dtype": "bfloat16"}
CAST |= {"changed": 2, "was": 257.0, "now": 256.0}
SCALER = {"kind": "scaler", "cls": "torch.amp.grad_scaler.GradScaler"}
READ = {"kind": "partial_read", "op": "item", "placements": ["_NormP(2)"]}
BRANCH = [
    {"kind": "partial_read", "op": "__bool__", "placements": ["P(sum)"], "truth": it}
    for it in (False, True)
]
LEFT = {"kind": "zeroed", "step": 2, "unsynced": ["w"]}
UNCLEARED = {"kind": "not_cleared", "names": ["head.weight"]}
UNSYNCED = [model(), micro(), step(unsynced=["w"]), stepped(), LEFT, *STEP_2]
FOLLOWS = shard(reduce_dtype=None)
IN_BF16 = {"module": "", "param_dtype": "bfloat16", "reduce_dtype": None}

test_the_status = judged_as(
    row(LOSSY, "fail", [shard(), model(), CAST, *BASE], names=("257", "256")),
    row(LOSSY, "pass", [shard(), *PLAIN]),
    row(LOSSY, "not_applicable", [shard(None), *PLAIN]),
    row(LOSSY, "inconclusive", [shard(None), *BASE]),
    row(FP16, "fail", [shard("float16"), *PLAIN]),
    row(FP16, "pass", [shard("float16"), model(), SCALER, *BASE]),
    row(FP16, "not_applicable", [shard("bfloat16"), *PLAIN]),
    row(FP16, "pass", scaled(1024.0)),  # the script scales its loss itself
    *(row(FP16, "fail", scaled(factor)) for factor in (1000.0, 2.0)),
    row(PARTIAL, "fail", PLAIN, [*PLAIN, READ, READ], at=LINE, names=("`.item()`", "_NormP(2)")),
    row(PARTIAL, "pass", PLAIN),
    row(
        PARTIAL, "pass", *([*PLAIN, BRANCH[0]] for _ in range(2))
    ),  # a condition that the ranks read alike
    row(PARTIAL, "fail", *([*PLAIN, read] for read in BRANCH)),
    row(PARTIAL, "not_applicable", [model(parameter(sharded=False)), *BASE]),
    row(SURVIVE, "fail", [*PLAIN, LEFT, *STEP_2], names=("w",)),
    row(SURVIVE, "pass", [*PLAIN, LEFT]),  # left at the end
    row(
        SURVIVE,
        "fail",
        [model(), micro(), step(unsynced=["w"], held=["v"]), stepped(), LEFT, *STEP_2],
        names=("w",),
    ),  # of a GAN
    row(SURVIVE, "pass", [model(), LEFT, {"kind": "discarded"}, *BASE]),
    row(SURVIVE, "pass", UNSYNCED),  # what a step had not reduced is another fault
    row(RESYNC, "fail", UNSYNCED),
    *(row(rule, "not_applicable", PLAIN) for rule in (SURVIVE, RESYNC)),
    *(row(rule, "pass", [model(), {"kind": "sync"}, *BASE]) for rule in (SURVIVE, RESYNC)),
    row(CLEARED, "fail", [*PLAIN, UNCLEARED, *STEP_2], names=("head.weight",)),
    row(CLEARED, "pass", [*PLAIN, UNCLEARED]),
    row(CLEARED, "not_applicable", PLAIN, **sources("optimizer.step()")),
    row(CLEARED, "pass", PLAIN, **sources("net.zero_grad()")),
    row(EPOCH, "fail", between(begin())),  # the same order twice
    row(EPOCH, "pass", between(begin(1))),
    row(EPOCH, "pass", between(begin(dataset=1))),
    row(
        EPOCH, "pass", [model(), begin(), begin(), *BASE, micro(2), micro(3)]
    ),  # a look at the first batch
    row(EPOCH, "pass", between(begin(0), begin(1))),  # an evaluation over the training data
    row(EPOCH, "not_covered", between(begin(shuffle=False))),
    row(EPOCH, "not_covered", between()),  # one epoch is left to the sources
    row(EPOCH, "fail", between(), hits={EPOCH: (Hit(EPOCH, "no set_epoch in the loop", LINE),)}),
    row(EPOCH, "not_applicable", PLAIN),
    row(DRAWS, "not_applicable", recomputed()),
    row(DRAWS, "pass", recomputed(True), names=("model.py, Block.forward",)),
    row(DRAWS, "fail", recomputed(True, False), names=("model.py, Block.forward",)),
    row(DRAWS, "inconclusive", [model()]),
    *(row(REDUCE, "fail", [FOLLOWS, *rest]) for rest in ([], [model(groups=[IN_BF16]), *BASE])),
    row(
        REDUCE,
        "pass",
        [FOLLOWS, model(parameter("teacher.w"), groups=[IN_BF16]), *BASE],
        names=("get no gradients",),
    ),
    row(REDUCE, "inconclusive", [shard()]),
    row(REDUCE, "pass", [shard(), *PLAIN]),
    row(REDUCE, "not_applicable", [shard(None, reduce_dtype=None), *PLAIN]),
    row(
        "random-numbers-repeat",
        "fail",
        stream(1, 2, (7, True), 8, (7, True)),
        at=LINE,
        names=("3, 5",),
    ),
    row(
        "random-numbers-repeat", "pass", stream(1, 2, (7, False), 8, (7, False))
    ),  # a phase is begun again
    row(
        "random-numbers-repeat",
        "fail",
        stream(1, 2, (7, False), 8, (7, False), 8, (7, False)),
        at=LINE,
    ),
    row(
        "random-numbers-repeat", "pass", stream(1, 2, 1, 2, 1)
    ),  # nothing sets it: a roll-back of the whole run
    row(
        "random-numbers-repeat", "pass", stream(1, (7, True), 7, 7, (7, True), 7)
    ),  # the training draws nothing
    row(
        "random-numbers-repeat", "pass", stream((7, True), (8, True), (7, True), (8, True))
    ),  # set for each step
    row("random-numbers-repeat", "not_applicable", stream()),
    row("bf16-master-weights", "pass", master("float32")),
    row("bf16-master-weights", "fail", master("bfloat16")),
    row(
        "bf16-master-weights", "inconclusive", master("bfloat16", cls="torchao.optim.AdamW8bit")
    ),  # has its own
    *(
        row(
            rule, "inconclusive", [shard(), model(), micro(), step(held=[]), stepped(moved={})]
        )  # no parameter that was seen
        for rule in ("bf16-master-weights", "optim-before-shard", "optim-built-after-forward")
    ),
    *(
        row(rule, status, [shard(), model(), micro(), step(held=[]), stepped()])
        for rule, status in (  # it holds copies, which the script writes into the model
            ("bf16-master-weights", "not_applicable"),
            ("optim-before-shard", "pass"),
            ("optim-built-after-forward", "pass"),
        )
    ),
)

# Rules on errors that torch raises, of a run that none has stopped.
PREMUL, FULL, NO_SYNC, MESHES = (
    "gloo-premul-sum",
    "full-sd-into-dtensor",
    "no-sync-idiom",
    "clip-mixed-mesh",
)
SHOWN: dict[str, Records] = {
    PREMUL: [shard(None), {"kind": "divide", "factor": 1.0}],
    "buffers-and-odd-inputs-not-cast": [shard()],
    "output-dtype-on-inner-blocks": [shard(output_dtype="float32")],
    "meta-not-materialized": [shard(None), {"kind": "to_empty"}],
}
WHOLE = [shard(None, parameters=[{"name": "w"}]), *PLAIN]
SHARDED = [shard(None), *PLAIN]
LOADED = {"kind": "checkpoint", "op": "torch.load", "after_step": 0, "to": ""}
CLIP, TWO = {"kind": "clips"}, model(parameter("w"), parameter("v", mesh=[1, 2]))

test_errors_of_torch = judged_as(
    *(row(rule, "not_applicable", WHOLE, WHOLE, **sources()) for rule in SHOWN),
    *(
        row(rule, "pass", [*there, *PLAIN], [*there, *PLAIN], **sources())
        for rule, there in SHOWN.items()
    ),
    row(
        PREMUL, "inconclusive", [{"kind": "divide", "factor": 1.0}, *PLAIN], **sources()
    ),  # one rank reduces nothing
    row(FULL, "not_applicable", SHARDED, SHARDED, **sources()),
    row(FULL, "pass", SHARDED, SHARDED, **sources("model.load_state_dict(x)")),
    row(FULL, "not_covered", SHARDED, SHARDED, saving=LINE, **sources("model.load_state_dict(x)")),
    row(FULL, "pass", *[[shard(None), LOADED, *PLAIN]] * 2, saving=LINE, **sources()),
    row(NO_SYNC, "not_applicable", SHARDED, SHARDED, **sources()),
    row(NO_SYNC, "not_covered", SHARDED, SHARDED, **sources("with model.no_sync():")),
    row(NO_SYNC, "pass", *[[shard(None), micro(), *PLAIN]] * 2, **sources("with model.no_sync():")),
    row(MESHES, "not_applicable", [model(parameter("w")), CLIP, *BASE], **sources()),
    row(MESHES, "not_applicable", [TWO, *BASE], **sources()),
    row(MESHES, "pass", [TWO, CLIP, *BASE], **sources()),
    *(
        row(rule, status, *ranks, **sources())
        for rule in ("lowbit-or-unsupported-optimizer", "mixed-orig-dtype-in-group")
        for status, ranks in (("pass", [SHARDED, SHARDED]), ("inconclusive", [PLAIN]))
    ),
    *(
        row(r, "inconclusive", [shard(None), model()], **sources())
        for r in (*SHOWN, FULL, NO_SYNC, MESHES)
    ),  # no step
)


EMPTY = {"kind": "to_empty"}


def buffered(unset: int = 0) -> dict[str, Any]:
    return model(parameter(unset=unset), buffers=[{"name": "rope", "shape": [4], "unset": unset}])


def provoked(unset: int = 0) -> dict[str, Run]:
    return {"provoked": run([EMPTY, buffered(unset)], role="provoked")}


test_uninitialised_memory = judged_as(
    *(
        row(rule, status, [*records, *BASE], **more)
        for rule in ("meta-buffers-garbage", "meta-params-not-reset")
        for status, records, more in (
            ("not_applicable", [buffered()], provoked()),
            ("pass", [EMPTY, buffered()], provoked()),
            ("fail", [EMPTY, buffered()], provoked(3)),
            ("inconclusive", [EMPTY, buffered()], {}),
        )
    ),
    row("meta-buffers-garbage", "not_applicable", [EMPTY, *PLAIN], **provoked()),
)


class TestMatrixOptimizer:
    """A class of the script's own that works on shards, against one process."""

    def judge(
        self, update: float = 0.0, grads: float = 1.0, cls: str = "Muon", shards: bool = True
    ) -> Finding:
        def rank(
            copy: int, rows: tuple[int, ...], grads: float = 1.0, update: float = 0.0
        ) -> Records:
            optimizer = {"kind": "optimizer", "cls": cls, "number": 0}
            asked = [{"kind": "shard_in_step"}] if shards else []
            size = {"w": [grads**2, grads, 0.0, 0.0, 0.0]}
            after = {"w": [1.0, 0.9 - update, 0.0, 0.0, 0.0]}
            whole = model(parameter("w", copy))
            return [
                optimizer,
                whole,
                micro(rows=rows),
                step(grads=size),
                *asked,
                stepped(weights=after),
            ]

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


def test_the_line_that_takes_a_shard_is_one_of_the_optimizer_s_class_if_it_has_one(
    tmp_path: Path,
) -> None:
    muon = "class Muon:\n    def step(self, p):\n        return p._local_tensor\n"
    script = written(tmp_path, f"def clip(p):\n    return p.to_local()\n\n{muon}")
    found = [find_shard_use(Files().sources((script,)), name) for name in ("Muon", "Other")]
    assert [place.line for place in found if place is not None] == [6, 2]
    script.write_text("def clip(p):\n    return p.full_tensor()\n")
    assert find_shard_use(Files().sources((script,)), "Muon") is None


@cases("loss, status", (0.0, "pass"), (1e-3, "fail"))
def test_losses_that_came_down_to_zero_are_compared_after_resharding(
    loss: float, status: str
) -> None:
    save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "", "keys": []}
    records = [
        model(),
        micro(1),
        step(1),
        stepped(1),
        save,
        micro(2, loss=0.0),
        step(2),
        stepped(2),
    ]
    resharded = run([model(), micro(1, loss=loss), step(1), stepped(1)], role="reshard")
    whole, again = run(records), run(records, role="perturbed")
    more = {
        "resume_full_precision": whole,
        "reshards": (resharded,),
        "reference": whole,
        "perturbed": again,
    }
    assert judge("reshard-keeps-trajectory", whole, **more).status == status


POSITION = """
def setup(saved):
    loader = build()
    loader.load_state_dict(saved["loader"])
    model.load_state_dict(saved["model"])
"""


@cases("text, line", (POSITION, 4), (POSITION + POSITION.replace("setup", "again"), 1), ("", 1))
def test_other_samples_after_resharding_stand_where_the_position_is_restored(
    text: str, line: int
) -> None:
    """Else at the line that loads."""
    save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "", "keys": []}
    made = [r for k in (1, 2, 3) for r in (micro(k, rows=(k,)), step(k), stepped(k))]
    whole = run([model(), *made[:3], save, *made[3:]])
    load = {**save, "op": "load", "at_line": {**vars(LINE), "line": 1}}
    again = [micro(1, loss=2.0, rows=(1,)), step(1), stepped(1)]
    more = {
        "resume_full_precision": whole,
        "reshards": (run([model(), load, *again], role="reshard"),),
        "sources": Sources({"t.py": text}, ("t.py",)),
    }
    found = judge("reshard-keeps-trajectory", whole, **more)
    assert "1 of 1 samples of the next step differ" in found.evidence
    assert found.location is not None and found.location.line == line


@cases(
    "loss, alone, status, suspicion",
    (1.00002, True, "pass", False),
    (1.0001, True, "fail", True),
    (1.0001, False, "fail", False),
    (1.1, True, "fail", False),
)
def test_later_losses_after_resharding_may_be_further_apart(
    loss: float, alone: bool, status: str, suspicion: bool
) -> None:
    """`loss`: of the second step, 1 without the resume.

    Another order of summation grows from step to step.

    Up to 100 times the limit it needs another failure beside it, where the script trains as one
    process does (`alone`).
    """
    save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "", "keys": []}
    made = [r for k in (2, 3, 4) for r in (micro(k), step(k), stepped(k))]
    whole = [
        run([model(), micro(1), step(1), stepped(1), save, *made], role=role)
        for role in ("train", "perturbed")
    ]
    later = [micro(1), step(1), stepped(1), micro(2, loss), step(2), stepped(2)]
    more = {"resume_full_precision": whole[0], "reference": whole[0], "perturbed": whole[1]}
    more |= (
        {"full_precision": whole[0], "single": replace(whole[0], role="single")} if alone else {}
    )
    resharded = run([model(), *later], role="reshard")
    found = judge("reshard-keeps-trajectory", whole[0], reshards=(resharded,), **more)
    assert (found.status, found.suspicion) == (status, suspicion)


@cases(
    "steps, asked, required, suspicion",
    (1, False, False, False),
    (2, False, True, True),
    (2, True, True, False),
)
def test_a_resharded_run_that_stops(
    steps: int, asked: bool, required: bool, suspicion: bool
) -> None:
    """After several steps it is asked to be confirmed, unless this number of ranks was asked
    for.
    """
    save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "", "keys": []}
    made = [r for k in (2, 3) for r in (micro(k), step(k), stepped(k))]
    whole = run([model(), micro(1), step(1), stepped(1), save, *made])
    again = [record for k in range(1, steps + 1) for record in (micro(k), step(k), stepped(k))]
    resharded = replace(stopped("RuntimeError", "other meshes", [model(), *again]), role="reshard")
    more = {"resume_full_precision": whole, "course": Course(sizes_chosen=asked)}
    found = judge("reshard-keeps-trajectory", whole, reshards=(resharded,), **more)
    assert (found.status, found.required, found.suspicion) == ("fail", required, suspicion)
