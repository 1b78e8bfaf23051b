"""Right designs that look like faults, each beside the fault that it looks like, on recorded
traces.
"""

import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from records import cases, entropy, judge, micro, model, parameter, run, step, stepped, trained
from scripts import Verify, written
from verified_fsdp2.verifier.analysis.follow_up_runs import for_a_resume
from verified_fsdp2.verifier.analysis.reopened_checkpoints import differing
from verified_fsdp2.verifier.analysis.state import begun_anew, evaluated
from verified_fsdp2.verifier.analysis.steps_to_compare import prepares_before_sharding
from verified_fsdp2.verifier.analysis.unusual_parallelism import (
    divided_by_script,
    parts_and_meets,
    resumable,
)
from verified_fsdp2.verifier.analysis.weight_snapshots import kept_under_a_comparison
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.probe import starting_point
from verified_fsdp2.verifier.probe.events.models import Models
from verified_fsdp2.verifier.trace import Run
from verified_fsdp2.verifier.trace.events import InspectedCheckpoint, Micro, SavedEntry, signature

SHARD: dict[str, Any] = {"kind": "shard", "module": "", "cls": "M", "parameters": []}


def sources(text: str) -> Sources:
    return Sources({"train.py": text}, ("train.py",))


def steps(*batches: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        r for k, rows in enumerate(batches, 1) for r in (micro(k, rows=rows), step(k), stepped(k))
    ]


@cases(
    "records, prepares",
    ([model(), SHARD, model()], True),
    ([SHARD, model()], False),
    ([model()], False),
)
def test_a_model_that_is_called_before_it_is_sharded(
    records: list[dict[str, Any]], prepares: bool
) -> None:
    assert prepares_before_sharding(run([*records, *steps((1, 2))])) is prepares
    assert prepares_before_sharding(run(records)) is False


@cases("alone, passes", (((1, 2), (3, 3)), True), (((1, 2), (3, 4)), False))
def test_equal_samples_of_two_ranks_may_be_twice_in_the_data(
    alone: tuple[tuple[int, ...], ...], passes: bool
) -> None:
    ranks = [[model(), *steps((1,), (3,))], [model(), *steps((2,), (3,))]]
    single = run([model(), *steps(*alone)], role="single")
    assert (judge("same-data-on-every-rank", *ranks, single=single).status == "pass") is passes


@cases("samples, status", ((1, 2), "fail"), ((1, 9), "pass"))
def test_a_resume_on_another_number_of_ranks_may_draw_other_samples(
    samples: tuple[int, ...], status: str
) -> None:
    """`samples`: those of one process from scratch; two ranks together have 1 and 2 in step 1."""
    save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "/c"}
    ranks = [[model(), *steps((k,)), save, *steps((k,), (k + 2,))[3:]] for k in (1, 2)]
    train = run(*ranks)
    weights = {"w": [2.0, 2.0, 0.0, 0.0, 0.0]}  # the two parts of the ranks together
    again = run(
        [model(), micro(1, 9.0, rows=(3, 9)), step(1, weights=weights), stepped(1)], role="reshard"
    )
    single = run([model(), *steps(samples)], role="single")
    found = judge(
        "reshard-keeps-trajectory",
        train,
        resume_full_precision=train,
        reshards=(again,),
        single=single,
    )
    assert found.status == status, found.evidence


def test_parameters_that_the_script_divides_itself() -> None:
    parts = run(
        *[[model(parameter("table", managed=False, sharded=False, shape=[4, 2]), parameter("w"))]]
        * 2
    )
    whole = run(
        [model(parameter("table", managed=False, sharded=False, shape=[8, 2]), parameter("w"))],
        role="single",
    )
    assert divided_by_script(Evidence(train=parts, single=whole)) == {"table"}
    assert divided_by_script(Evidence(train=parts)) == set()


@cases("apart, meets", ((0, 1, 0), True), ((0, 1, 2), False), ((0, 0, 0), False))
def test_replicas_that_meet_again(apart: tuple[int, ...], meets: bool) -> None:
    ranks = []
    for rank in (0, 1):
        weights = [{"w": [1.0, 1.0 + rank * value, 0.0, 0.0, 0.0]} for value in apart]
        made = [step(k, weights=held) for k, held in enumerate(weights, 1)]
        ranks.append(
            [
                model(parameter("w", copy=rank)),
                *(r for one in made for r in (one, stepped(one["step"]))),
            ]
        )
    assert parts_and_meets(run(*ranks)) is meets


def from_the_middle(weight: float) -> tuple[Run, Run]:
    """A save after the first of the two backward passes of step 2, and what is resumed from it."""
    save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "/c"}
    after = stepped(2, weights={"w": [1.0] * 5})
    ranks = [
        [
            model(),
            *steps((1,)),
            micro(2, rows=(2,)),
            save,
            micro(2, rows=(3,)),
            step(2),
            after,
            *steps((4,)),
        ]
    ] * 2
    more = [micro(1, rows=(3,)), step(1), stepped(1, weights={"w": [weight] * 5})]
    return run(*ranks), run(*[[model(), *more]] * 2, role="resume")


@cases("weight, status", (1.0, "pass"), (2.0, "fail"))
def test_a_save_in_the_middle_of_a_step_holds_its_gradients(weight: float, status: str) -> None:
    train, resume = from_the_middle(weight)
    evidence = Evidence(train=train, resume=resume)
    assert evidence.saved_after() == 1
    found = judge("resume-is-exact", evidence)
    assert found.status == status, found.evidence
    assert judge("scheduler-or-progress-not-restored", evidence).status == "not_applicable"


@cases("cleared, status", (True, "pass"), (False, "fail"))
def test_a_backward_at_the_end_of_a_line_search(cleared: bool, status: str) -> None:
    """A script that updates its weights itself saves after a backward whose gradients it has taken
    away.
    """
    save = {"kind": "checkpoint", "op": "torch.save", "after_step": 1, "to": "/c"}
    search = [micro(2, rows=(1,)), *([{"kind": "cleared", "step": 2}] if cleared else []), save]
    ranks = [
        [model(), *steps((1,)), *search, micro(2, rows=(1,)), step(2), stepped(2), *steps((1,))]
    ] * 2
    train = run(*ranks)
    resume = run(
        *[[model(), micro(1, rows=(1,)), step(1), stepped(1, weights={"w": [9.0] * 5})]] * 2,
        role="resume",
    )
    assert len(resumable(train, 1).micros(2)[0]) == (1 if cleared else 2)
    again = run(*[[model(), micro(1, rows=(1,)), step(1), stepped(1)]] * 2, role="resume")
    assert (
        judge("resume-is-exact", Evidence(train=train, resume=again if cleared else resume)).status
        == status
    )


@cases("own, status", (0.5, "pass"), (1.0, "fail"))
def test_gradients_that_are_divided_before_they_are_clipped(own: float, status: str) -> None:
    """Two micro-batches whose losses are summed; the script multiplies the gradients by `own`
    before it clips them.
    """
    whole, clipped = ({"w": [(2.0 * k) ** 2, *[k] * 4]} for k in (1.0, 0.1))
    at_clip = {"w": [(2.0 * own) ** 2, *[own] * 4]}
    passes = [micro(1, criteria=entropy(4, 1.0))] * 2
    last = step(1, grads=at_clip, after_backward=whole, grads_at_step=clipped)
    assert (
        judge("gradient-of-mean-loss", *[[model(), *passes, last, stepped()]] * 2).status == status
    )


@cases("second, status", ("", "fail"), ("model1.", "not_applicable"))
def test_peers_that_learn_from_one_another(second: str, status: str) -> None:
    """A backward for each of two models, before either optimizer steps: each loss is the mean of
    its own model.
    """
    models = (
        [model(), model(parameter(f"{second}v"), root=second)]
        if second
        else [model(parameter(), parameter("v"))]
    )
    passes = [micro(1, criteria=entropy(4, 1.0))] * 2
    ends = [
        step(1, held=["w"]),
        stepped(1),
        step(1, held=[f"{second}v"], optimizer=1),
        stepped(1, optimizer=1),
    ]
    assert judge("gradient-of-mean-loss", *[[*models, *passes, *ends]] * 2).status == status


EVALUATION = """
class Distance:
    @torch.no_grad()
    def __call__(self):
        return distance_of(self.model)


def main():
    measure = Distance()
    while True:
        loss = train_step()
        value = measure()
        with torch.no_grad():
            again = measure()


def train_step():
    samples = []
    for x in batches:
        samples.append(x)
        loss_of(x).backward()
    optimizer.step()


def epoch():
    for x in batches:
        train_step()
"""


def test_what_an_object_computes_without_gradients_is_an_evaluation() -> None:
    values = {
        f"main.{name}": {"holder": "local", "value": 1.0, "dtype": "float"}
        for name in ("value", "again", "loss")
    }
    first = {"kind": "state", "step": 1, "values": {}, "gone": [], "evaluations": 0, "in_eval": []}
    records = [first, {**first, "step": 2, "values": values, "evaluations": 1}]
    assert evaluated(run([*steps((1,)), *records]), sources(EVALUATION)) == {
        "main.value",
        "main.again",
    }


DISTANCE = """
@torch.no_grad()
def integrate(net):
    return net()


def main(target):
    reference = moments(dataset())
    for step in range(9):
        loss = train(net)
        fake = integrate(net)
        near = distance(moments(fake), reference)
        mixed = distance(moments(fake), loss)
        given = distance(moments(fake), target)
"""


def test_a_distance_to_what_was_computed_before_the_loop_is_of_the_evaluation() -> None:
    values = {
        f"main.{name}": {"holder": "local", "value": 1.0, "dtype": "float"}
        for name in ("near", "mixed", "given")
    }
    first = {"kind": "state", "step": 1, "values": {}, "gone": [], "evaluations": 0, "in_eval": []}
    records = [first, {**first, "step": 2, "values": values, "evaluations": 1}]
    assert evaluated(run([*steps((1,)), *records]), sources(DISTANCE)) == {"main.near"}


def test_the_variables_of_a_function_that_makes_one_step_are_no_state() -> None:
    looped = EVALUATION + "\n\ndef fit():\n    for _ in range(3):\n        epoch()\n"
    assert begun_anew(sources(looped)) == {"train_step"}


@cases("squares, same", (4.0, True), (9.0, False))
def test_uneven_shards_in_the_file_of_one_rank(squares: float, same: bool) -> None:
    """Another process does not know how long this rank's part is, so the sketch has its sum of
    squares alone.
    """
    entry = SavedEntry(
        kind="dtensor",
        shape=[27],
        dtype="float32",
        sharded=True,
        sketch=[squares, *[float("nan")] * 4],
    )
    record = InspectedCheckpoint(path="/1.pt", format="torch", entries={"w": entry})
    assert (differing(record, {"w": [[4.0, 1.0, 2.0, 3.0, 4.0]]}) == []) is same


@pytest.mark.parametrize("name", ["matches-ddp", "matches-single-process"])
def test_samples_that_are_padded_otherwise_are_the_same_where_all_numbers_are(name: str) -> None:
    mine, other = trained(2), trained(2 if name == "matches-ddp" else 1)
    padded = replace(
        other,
        traces=tuple(replace(t, records=tuple(map(_padded, t.records))) for t in other.traces),
    )
    role = "reference" if name == "matches-ddp" else "single"
    assert (
        judge(name, mine, **{role: padded}).status
        == judge(name, mine, **{role: other}).status
        == "pass"
    )


def _padded(record: Any) -> Any:
    return (
        replace(record, rows=[row + 1000 for row in record.rows])
        if record.kind == "micro"
        else record
    )


HOOKED = """
import torch
from torch import nn
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
fully_shard(model[0])
fully_shard(model)


@torch.no_grad()
def update(param):
    param.to_local().sub_(0.1 * param.grad.to_local())
    param.grad = None


for param in model.parameters():
    param.register_post_accumulate_grad_hook(update)
samples = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
for step in range(8):
    mine = samples[8 * step : 8 * step + 8].chunk(dist.get_world_size())[dist.get_rank()]
    model(mine).square().mean().backward()
dist.destroy_process_group()
"""


@pytest.mark.launch
def test_hooks_that_update_the_weights_within_the_backward(
    verify_script: Verify, tmp_path: Path
) -> None:
    verdict = verify_script(written(tmp_path, HOOKED), ("matches-ddp", "matches-single-process"))
    assert [finding.status for finding in verdict.findings] == ["pass", "pass"]
    made = {one["role"]: len(one["losses"]) for one in verdict.runs}
    assert made["train"] == made["single"] >= 5


@cases(
    "mesh, rank, found",
    ([0, 1], 1, [0.0, 1.0]),
    ([1], 1, [1.0]),
    ([0], 0, [0.0]),
    ([], 1, [0.0, 1.0]),
    ([1], 2, [0.0, 1.0]),
)
def test_weights_that_ranks_of_other_meshes_hold(
    mesh: list[int], rank: int, found: list[float]
) -> None:
    """A matrix that the script divides itself over a tensor dim has the same name on ranks that do
    not share it.
    """
    saved = [{"rank": r, "parts": {"w": (torch.tensor([float(r)]), [0], mesh)}} for r in (0, 1)]
    assert [float(part) for part, _ in starting_point._parts(saved, "w", rank)] == found


@cases(
    "managed, whole, status",
    (False, [8, 4], "pass"),
    (False, [4, 4], "fail"),
    (True, [8, 4], "fail"),
)
def test_parts_that_the_script_divides_are_other_ones_on_other_ranks(
    managed: bool, whole: list[int], status: str
) -> None:
    def head(shape: list[int]) -> dict[str, Any]:
        return model(
            parameter("head", managed=managed, sharded=managed, shape=shape), parameter("w")
        )

    save = {"kind": "checkpoint", "op": "save", "after_step": 1, "to": "/c"}
    held = {"head": [2.0, 2.0, 0.0, 0.0, 0.0], "w": [1.0, 1.0, 0.0, 0.0, 0.0]}
    other = held | {"head": [9.0, 3.0, 0.0, 0.0, 0.0]}
    steps = [
        micro(1),
        step(1),
        stepped(1),
        save,
        micro(2),
        step(2, weights=held, held=list(held)),
        stepped(2),
    ]
    train = run([head([4, 4]), *steps])
    again = run(
        [head(whole), micro(1), step(1, weights=other, held=list(held)), stepped(1)], role="reshard"
    )
    runs = {"resume_full_precision": train, "reference": train, "perturbed": train}
    assert judge("reshard-keeps-trajectory", train, reshards=(again,), **runs).status == status


@cases(
    "then, retired, in_phases",
    ("model1.w", [""], True),  # each stage has a model of its own, of the same shapes
    ("w", [], False),
)
def test_what_a_resume_is_told_of_stages(then: str, retired: list[str], in_phases: bool) -> None:
    models = [model(parameter("w")), model(parameter("model1.w"), root="model1.")]
    first = [micro(1), step(1, held=["w"]), stepped(1)]
    second = [micro(2), step(2, held=[then]), stepped(2)]
    given = for_a_resume(run([*models, *first, *second]), 1)
    assert (given["retired"], given["in_phases"]) == (retired, in_phases)


@cases("frozen, numbers", (True, [0, 1]), (False, [1, 2]))
def test_frozen_learners_of_earlier_stages_keep_their_numbers(
    frozen: bool, numbers: list[int]
) -> None:
    """A resume that makes them again calls each when it is read; one that trains only its stage has
    that alone.
    """
    learners = [nn.Linear(2, 2) for _ in range(2)]
    learners[0].requires_grad_(not frozen)
    known = signature([("weight", [2, 2]), ("bias", [2])])
    request = SimpleNamespace(models={"": known, "model1.": known}, retired=[""])
    session: Any = SimpleNamespace(request=request, roots=[], tops=[])
    models, found = Models(session), []
    for learner in learners:
        session.tops.append(weakref.ref(learner))
        number, name = models._number(learner)
        session.roots.append((name, learner))
        found.append(number)
    assert found == numbers


@cases(
    "loop, kept",
    ("for m in blocks:\n        m.shard()", set()),
    ("m = m or 1", {("main", "m"), ("", "m")}),
)
def test_the_variable_of_another_loop_is_no_snapshot(loop: str, kept: set[tuple[str, str]]) -> None:
    branch = (
        "        if step % 2 == 0 and step < 8:\n            m = state()\n            save(m)\n"
    )
    text = f"def main():\n    {loop}\n    while step < 9:\n{branch}"
    assert kept_under_a_comparison(sources(text)) == kept


@cases("cleared, status", (True, "not_applicable"), (False, "fail"))
def test_micro_batches_whose_gradients_are_cleared_are_of_another_step(
    cleared: bool, status: str
) -> None:
    """A gradient that is applied one round late: two backward passes, each divided by its own
    number of targets.
    """
    edited = {"kind": "edited_gradients", "step": 1, "micro": 1, "factors": {"w": 0.0}}
    passes = [micro(1, criteria=entropy(n, 1.0)) for n in (4, 8)]
    records = [model(), passes[0], *([edited] if cleared else []), passes[1], step(1), stepped(1)]
    single = run(records, role="single")
    assert judge("token-mean-of-means", records, records, single=single).status == status


@cases("grads, status", (1.0, "pass"), (1.1, "inconclusive"))
def test_samples_cut_into_other_rows_on_other_ranks(grads: float, status: str) -> None:
    """Packing makes 8 rows on two ranks and 7 in one process, of the same documents."""
    alone = trained(1, grads)
    for trace in alone.traces:
        for record in trace.of(Micro):
            object.__setattr__(record, "rows", record.rows[:7])
    runs = {
        "full_precision": trained(2),
        "single": alone,
        "reference": trained(2),
        "perturbed": trained(2),
    }
    assert judge("matches-single-process", Evidence(train=trained(2), **runs)).status == status
