"""The rules of the mesh family, and what runs say of tensor parallelism, on written records."""

from typing import Any

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
    wrap,
)
from verified_fsdp2.verifier.analysis.gradient_scale_causes import total_weight
from verified_fsdp2.verifier.trace.events import Step

Records = list[dict[str, Any]]
GRID = [0, 1, 2, 3]


def replica(copy: int, start: float = 1.0, after: float = 1.0, *records: dict[str, Any]) -> Records:
    entry = parameter(
        "w", copy, placements=["R", "S(0)"], mesh=[2, 1], sketch=[1.0, start, 0.0, 0.0, 0.0]
    )
    return [
        model(entry),
        *records,
        micro(),
        step(),
        stepped(weights={"w": [1.0, after, 0.0, 0.0, 0.0]}),
    ]


HELD = {"kind": "partial", "groups": ["layer"], "step": 1}
INIT, LEFT_OFF = "hsdp-replicas-diverge-at-init", "hsdp-all-reduce-left-off"
ARGUMENT, MESH = "mesh-argument-wrong", "sampler-rank-ignores-mesh"
PLAIN = [model(), micro(), step(), stepped()]
test_replicas = judged_as(
    row(INIT, "pass", replica(0), replica(1)),
    row(INIT, "fail", replica(0), replica(1, start=1.1)),
    row(LEFT_OFF, "fail", replica(0, 1.0, 1.0, HELD), replica(1)),
    row(LEFT_OFF, "pass", replica(0), replica(1)),
    row(LEFT_OFF, "fail", replica(0), replica(1, after=1.2)),  # they differ after a step
    row(LEFT_OFF, "inconclusive", replica(0), replica(1, start=1.1, after=1.2)),  # and before it
    *(row(rule, "not_applicable", PLAIN, PLAIN) for rule in (INIT, LEFT_OFF)),
    row("tp-fsdp-permuted-weights", "not_applicable", PLAIN),  # the script saves nothing
)


def test_replicas_that_differ_by_their_number_alone_are_named_by_that_rule_only() -> None:
    def rank(copy: int, value: float) -> Records:
        before = {"kind": "shard", "parameters": [{"name": "w", "cls": "M", "sketch": [value] * 5}]}
        return [before, *replica(copy, start=value)]

    ranks = [rank(0, 1.0), rank(1, 2.0)]
    assert judge("hsdp-replicas-diverge-at-init", *ranks).status == "fail"
    assert judge("rank-dependent-init-no-broadcast", *ranks).status == "not_applicable"


@cases("alone, status", (1.0, "pass"), (2.0, "fail"))
def test_weights_that_are_set_on_shards(alone: float, status: str) -> None:
    """Before that they may be whatever was in memory (`torch.empty`)."""

    def rank(number: int) -> Records:
        before = {
            "kind": "shard",
            "parameters": [{"name": "w", "cls": "M", "sketch": [3.0 + number] * 5}],
        }
        entry = parameter(
            "w", placements=["S(0)"], mesh=[2], sketch=[0.5, float(number), 0.0, 0.0, 0.0]
        )
        return [before, model(entry), micro(), step(), stepped()]

    single = run(
        [model(parameter("w", sketch=[1.0, alone, 0.0, 0.0, 0.0])), micro(), step(), stepped()],
        role="single",
    )
    assert (
        judge("rank-dependent-init-no-broadcast", rank(0), rank(1), single=single).status == status
    )


test_names_against_positions = judged_as(
    *(
        row(ARGUMENT, status, *[[wrap(GRID, names, shape), model()]] * 4)
        for status, names, shape in (
            ("pass", ("dp_replicate", "dp_shard"), (2, 2)),
            ("pass", ("replicate", "shard"), (2, 2)),
            ("fail", ("dp_shard", "dp_replicate"), (2, 2)),
            ("fail", ("shard", "replicate"), (1, 4)),
            ("inconclusive", ("shard", "replicate"), (1, 1)),
            ("fail", ("dp", "tp"), (2, 2)),
            ("pass", ("ddp", "fsdp"), (2, 2)),
            ("fail", ("fsdp", "ddp"), (2, 2)),
            ("pass", ("outer", "inner"), (2, 2)),
            ("pass", ("dp", "cp"), (2, 2)),
            ("not_applicable", ("tp",), (4,)),
            ("not_applicable", (), (2, 2)),
        )
    ),
    row(
        ARGUMENT,
        "not_applicable",
        *[[wrap(GRID, ("dp", "tp"), (2, 2), explicit_dims=True), model()]] * 4,
    ),
    row(ARGUMENT, "inconclusive", *[[wrap(GRID)]] * 4),  # no forward
    row(ARGUMENT, "fail", *[[wrap(GRID, ("dp", "tp"), (2, 2))]] * 4),
)


@cases(
    "names, batches, required",
    (("dp", "tp"), ("a", "a", "b", "b"), True),  # the ranks of a tp group train on the same samples
    (("dp", "tp"), ("a", "b", "c", "d"), False),
    (("tp", "dp"), ("a", "b", "a", "b"), True),
    (("dp_shard", "dp_replicate"), ("a", "b", "c", "d"), False),
)
def test_names_alone_only_warn(names: tuple[str, str], batches: str, required: bool) -> None:
    def rank(batch: str) -> Records:
        own = micro(rows=[ord(batch), ord(batch) + 100])
        return [wrap(GRID, names, (2, 2)), model(), own, step(), stepped()]

    found = judge(ARGUMENT, *map(rank, batches))
    assert (found.status, found.required) == ("fail", required)
    assert ("judged by the names" in found.evidence) != required


def grid(
    *rows: tuple[int, ...], placements: tuple[str, ...] = ("_S(0, 2)", "S(0)")
) -> list[Records]:
    entry = parameter(
        "w", placements=list(placements), mesh=[2, 2], mesh_names=["dp", "tp"], ranks=GRID
    )
    out = []
    for rank, own in enumerate(rows):
        out.append(
            [
                wrap([rank % 2, rank % 2 + 2], ("dp",)),
                model(entry),
                micro(rows=own),
                step(),
                stepped(),
            ]
        )
    return out


APART = grid((1,), (2,), (3,), (4,))
test_one_tensor_parallel_group_one_batch = judged_as(
    row(MESH, "pass", *grid((1,), (1,), (2,), (2,))),
    row(MESH, "fail", *APART),
    row(MESH, "fail", *grid((1,), (2,), (1,), (2,))),
    row(
        MESH, "not_applicable", *grid((1,), (2,), (3,), (4,), placements=("S(0)", "R"))
    ),  # no tensor-parallel group
    row(MESH, "inconclusive", *[[{"kind": "sharded_input"}, *records] for records in APART]),
)


def test_a_row_of_a_tensor_parallel_group_counts_once() -> None:
    seen = run(*grid((1, 5), (1, 5), (2,), (2,)))
    assert seen.data_ranks == [0, 2]
    assert seen.global_batch(1) == {1: 1, 5: 1, 2: 1}
    assert seen.objective(1) == 1.0


def context(
    *rows: tuple[int, ...], losses: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0), dim: str = "cp"
) -> list[Records]:
    """Four ranks of a mesh of 2 x 2, over all of which the weights are sharded."""
    made = {
        "kind": "named_mesh",
        "mesh": {"shape": [2, 2], "names": ["dp_shard", dim], "ranks": GRID},
    }
    one = [made, wrap(GRID, ("dp_shard_cp",)), model(parameter("w", mesh=[4], ranks=GRID))]
    return [
        [*one, micro(loss=loss, rows=own), step(), stepped()]
        for own, loss in zip(rows, losses, strict=True)
    ]


PAIRS = context((1, 5), (1, 5), (2, 3), (2, 3))
WHOLE = run([model(), micro(rows=(1, 2, 3, 5)), step(), stepped()], role="single")


def test_a_sample_of_a_context_parallel_group_counts_once() -> None:
    seen = run(*PAIRS)
    assert (seen.data_ranks, seen.sequence_groups, seen.sample_ranks) == (
        GRID,
        [[0, 1], [2, 3]],
        [0, 2],
    )
    assert seen.global_batch(1) == {1: 1, 5: 1, 2: 1, 3: 1}
    assert seen.objective(1) == 2.5
    no_target = run(*context((1, 5), (1, 5), (2, 3), (2, 3), losses=(1.0, 0.0, 3.0, 4.0)))
    assert no_target.global_batch(1) == seen.global_batch(1)


def test_ranks_are_of_one_context_by_the_name_of_the_dim_and_their_samples() -> None:
    for other in (context((1,), (1,), (2,), (2,), dim="dp_inner"), context((1,), (2,), (3,), (4,))):
        assert (run(*other).sequence_groups, run(*other).sample_ranks) == ([], GRID)


@cases(
    "rule, ranks, status",
    (MESH, PAIRS, "pass"),
    (MESH, context((1,), (2,), (3,), (5,)), "fail"),  # whole samples, as one process takes them
    (MESH, context((11,), (12,), (13,), (14,)), "not_applicable"),  # parts that the script has cut
    ("same-data-on-every-rank", PAIRS, "pass"),
    (
        "same-data-on-every-rank",
        context((1,), (1,), (1,), (1,), losses=(1.0, 2.0, 1.0, 2.0)),
        "fail",
    ),
)
def test_one_context_parallel_group_one_batch(rule: str, ranks: list[Records], status: str) -> None:
    assert judge(rule, *ranks, single=WHOLE).status == status


@cases("rows, known", (((1, 2), (1, 2)), True), (((1, 2), (3, 4)), False))
def test_losses_of_parts_that_fsdp_does_not_average(
    rows: tuple[tuple[int, ...], ...], known: bool
) -> None:
    """A mesh of 1 x 2 whose second dim shares the samples, or cuts them (moe_seqpar_router)."""
    made = {
        "kind": "named_mesh",
        "mesh": {"shape": [1, 2], "names": ["dp", "tp"], "ranks": [0, 1]},
    }
    criteria = entropy(8, 1.0)
    ranks = [
        [
            made,
            wrap([rank], ("dp",)),
            model(parameter("w", mesh=[1], ranks=[rank])),
            micro(rows=own, criteria=criteria),
            step(),
            stepped(),
        ]
        for rank, own in enumerate(rows)
    ]
    assert (total_weight(run(*ranks)) is not None) is known


def test_parallel_meshes_hold_copies() -> None:
    """A parameter beside tensor parallelism is sharded over dp; the two dp meshes hold the same."""
    ranks = []
    for rank in GRID:
        own = [rank % 2, rank % 2 + 2]
        entry = parameter("w", copy=min(own) * 2, ranks=own)
        ranks.append(
            [model(entry), micro(), step(weights={"w": [1.0, 2.0, 0.0, 0.0, 0.0]}), stepped()]
        )
    seen = run(*ranks)
    assert [e.copy for e in seen.parameters["w"]] == [0, 1, 0, 1]
    assert seen.whole(Step, "weights", 1)["w"] == [2.0, 4.0, 0.0, 0.0, 0.0]


@cases(
    "found, status",
    ([4.0, 1.0, 2.0, 0.0, 0.0], "pass"),
    ([4.0, -1.0, 0.5, 1.0, 0.0], "fail"),
    ([5.0, -1.0, 0.5, 1.0, 0.0], "pass"),
    ([4.0, 1.0, 2.0, 1e-9, 0.0], "pass"),
)
def test_the_same_values_in_another_order(found: list[float], status: str) -> None:
    saved = {"w": [4.0, 1.0, 2.0, 0.0, 0.0]}
    save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "", "keys": []}
    train = [
        *[model(), micro(1), step(1), stepped(1), save],
        micro(2),
        step(2, weights=saved),
        stepped(2),
    ]
    resumed = run([model(), micro(1), step(1, weights={"w": found}), stepped(1)], role="resume")
    assert judge("tp-fsdp-permuted-weights", train, resume=resumed).status == status
    assert judge("tp-fsdp-permuted-weights", train, reshards=(resumed,)).status == status
