"""Law L9 on recorded traces: each sample once in an epoch, on one rank; nothing evaluated is
trained on; a resume goes on.
"""

import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from records import LINE, cases, judge, judged_as, micro, row, run, step, stepped
from scripts import Verify, written
from verified_fsdp2.verifier.evidence import Evidence, Sources
from verified_fsdp2.verifier.probe.events.batch_origin import _origin as origin_of
from verified_fsdp2.verifier.probe.events.data import _parts as divided
from verified_fsdp2.verifier.probe.events.data import length
from verified_fsdp2.verifier.probe.frames import Frames
from verified_fsdp2.verifier.probe.measures import stream, vocabulary
from verified_fsdp2.verifier.trace import Run
from verified_fsdp2.verifier.trace.events import Micro, Place

ONCE, HELD_OUT, RESHARD = (
    "samples-once-per-epoch",
    "evaluated-on-training-samples",
    "reshard-keeps-trajectory",
)
Rows = Sequence[int]
Records = list[dict[str, Any]]
HERE = Place(file="data.py", line=3, function="order_of", code="")
BY_RANK = (
    "def order_of(epoch):\n    g = torch.Generator()\n    return torch.randperm(64,"
    " generator=g)\n\nown = {}\n"
)


def trained(batches: Iterable[Rows], before: dict[int, Records] | None = None) -> Records:
    """What a rank records that trains on these samples; `before` a step (from 1) it records
    more.
    """
    made: Records = []
    for k, rows in enumerate(batches, 1):
        made += [*(before or {}).get(k, []), micro(k, rows=tuple(rows)), step(k), stepped(k)]
    return made


def sampler(**more: Any) -> dict[str, Any]:
    return {"kind": "sampler", "shuffle": True, "samples": 32, "parts": 2, "at_line": HERE, **more}


def order(digest: int, samples: int = 64, **more: Any) -> dict[str, Any]:
    return {"kind": "order", "samples": samples, "digest": digest, "at_line": HERE, **more}


def cut(rows: Rows, size: int = 8) -> list[Rows]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def shuffled(seed: int, samples: int = 64) -> list[int]:
    return random.Random(seed).sample(range(samples), samples)


def dealt(*orders: Rows, ranks: int = 2) -> list[Records]:
    """Each rank takes its part of its own order, one after the other; `orders` by rank and then by
    epoch.
    """
    made = []
    for rank in range(ranks):
        epochs = [cut(one[rank::ranks]) for one in orders[rank::ranks]]
        begins = {
            1 + number * len(epochs[0]): [order(hash(tuple(one)))]
            for number, one in enumerate(orders[rank::ranks])
        }
        made.append(trained([batch for epoch in epochs for batch in epoch], begins))
    return made


def sliced(*starts: int, samples: int = 1000, size: int = 8) -> Records:
    return trained([[n % samples for n in range(start, start + size)] for start in starts])


A, B, C, D = map(shuffled, range(4))
SPLIT = Sources({"data.py": f"{BY_RANK}rows = order_of(0)[rank::world]\n"}, ("data.py",))
WALKED = Sources({"data.py": f"{BY_RANK}rows = order_of(0)[start : start + 8]\n"}, ("data.py",))


def drawn(own: bool, batches: Sequence[Sequence[Rows]], samples: int = 64) -> list[Records]:
    """Ranks that draw an order, their own or one for all, in the first step."""
    return [trained(rows, {1: [order(rank * own, samples)]}) for rank, rows in enumerate(batches)]


def echoed(times: int) -> list[Records]:
    return [
        trained([rows for rows in cut(range(r, 64, 2), 4) for _ in range(times)]) for r in (0, 1)
    ]


test_each_sample_once = judged_as(
    row(ONCE, "fail", *dealt(A, B, C, D), at=HERE),  # two epochs, each rank with orders of its own
    row(ONCE, "pass", *dealt(A, A, B, B)),
    row(
        ONCE, "fail", *drawn(True, [cut(A[::2]), cut(B[1::2])]), sources=SPLIT
    ),  # part of an epoch, and the code
    row(
        ONCE, "pass", *drawn(True, [cut(A[::2]), cut(B[1::2])]), sources=WALKED
    ),  # who knows how far they go
    row(ONCE, "pass", *drawn(False, [cut(A[::2]), cut(A[1::2])]), sources=SPLIT),
    row(
        ONCE, "pass", *drawn(True, [cut(A[::2]), cut(A[1::2])]), sources=SPLIT
    ),  # an order of something else
    *(
        row(
            ONCE,
            status,
            *drawn(True, [cut(A[::2]), cut(A[1::2])]),
            sources=SPLIT,
            single=run(trained(cut(alone))),
        )
        for status, alone in (("fail", [n + 64 for n in A]), ("pass", A))  # augmented, and not
    ),
    row(
        ONCE,
        "pass",
        *drawn(True, [cut([n % 16 for n in A]), cut([n % 16 for n in B])]),
        sources=SPLIT,
    ),  # equal samples
    row(
        ONCE,
        "pass",
        *[
            trained([*cut(a), *cut(b)], {1: [order(a[0])], 9: [order(b[0])]})
            for a, b in ((A, B), (C, D))
        ],
    ),
    row(
        ONCE, "pass", *[trained(cut(a), {k: [order(a[k], 8)] for k in range(1, 9)}) for a in (A, B)]
    ),  # mixup
)
test_samplers = judged_as(
    *(
        row(
            ONCE,
            status,
            *(trained(cut(range(r, 64, 2)), {1: [sampler(**own)]}) for r, own in enumerate(ranks)),
        )
        for status, ranks in (
            ("pass", ({}, {})),
            ("fail", ({"seed": 1}, {"seed": 2})),
            ("fail", ({"epoch": 0}, {"epoch": 1})),
            (
                "pass",
                ({"parts": 4}, {"parts": 4}),
            ),  # of several parts on each rank, or of a sample of the data
            ("pass", ({"seed": 1, "shuffle": False}, {"seed": 2, "shuffle": False})),
            (
                "pass",
                ({"seed": 1, "parts": 1}, {"seed": 2, "parts": 1}),
            ),  # each walks the whole data set
            ("pass", ({"seed": 1, "samples": 9}, {"seed": 2})),  # of other data
        )
    ),
    row(
        ONCE, "pass", *[[*trained(cut(range(r, 64, 2))), sampler(seed=r)] for r in (0, 1)]
    ),  # not trained on
)
test_orders_that_a_batch_sampler_divides = judged_as(
    *(
        row(
            ONCE,
            status,
            *(
                trained(cut(range(r, 64, 2)), {1: [order(own, parts=parts)]})
                for r, own in enumerate(ranks)
            ),
        )
        for status, parts, ranks in (("fail", 2, (1, 2)), ("pass", 2, (1, 1)), ("pass", 1, (1, 2)))
    ),
    row(
        ONCE, "pass", *[[*trained(cut(range(r, 64, 2))), order(r, parts=2)] for r in (0, 1)]
    ),  # not trained on
)


def test_who_divides_the_order_of_a_random_sampler() -> None:
    seen = []

    class Shuffled(RandomSampler):
        def __iter__(self) -> Iterator[int]:
            seen.append(divided(sys._getframe()))
            return super().__iter__()

    class Part(BatchSampler):
        num_processes, process_index = 2, 0

        def __iter__(self) -> Iterator[list[int]]:
            return itertools.islice(
                super().__iter__(), self.process_index, None, self.num_processes
            )

    list(DataLoader(range(8), batch_sampler=Part(Shuffled(range(8)), 2, False)))
    list(DataLoader(range(8), batch_size=2, sampler=Shuffled(range(8))))
    assert seen == [2, 0]


test_later = judged_as(
    row(ONCE, "fail", sliced(0, 8, 16, 24, 32, 40), sliced(8, 16, 24, 32, 40, 48)),
    row(  # windows that overlap in one process, too
        ONCE,
        "pass",
        *(sliced(0, 8, 16, 24, 32, 40), sliced(8, 16, 24, 32, 40, 48)),
        single=run(sliced(0, 8, 16, 24, 32, 40, size=16), role="single"),
    ),
    row(ONCE, "fail", sliced(0, 16, 32, 48, 64, 80), sliced(16, 32, 48, 64, 80, 96)),
    row(ONCE, "pass", sliced(0, 16, 32, 48, 64, 80), sliced(8, 24, 40, 56, 72, 88)),
    *(
        row(ONCE, "pass", *(sliced(*range(8 * r, 640, 16), samples=n) for r in (0, 1)))
        for n in (24, 40, 64, 100)
    ),  # wrapped
    row(
        ONCE, "pass", sliced(*range(0, 160, 8), samples=80), sliced(*range(40, 200, 8), samples=80)
    ),  # from elsewhere on
    *(row(ONCE, "pass", *echoed(times)) for times in (2, 3)),  # each batch several times
    row(ONCE, "not_covered", sliced(0, 8), sliced(8, 16)),
    row(ONCE, "not_applicable", sliced(0, 8, 16, 24, 32)),
    row(ONCE, "not_covered", trained([()] * 6), trained([()] * 6)),
)


@cases("samples, size", (6, 1), (12, 1), (40, 2), (40, 4), (200, 8))
def test_draws_with_replacement(samples: int, size: int) -> None:
    for seed in range(6):
        chosen = random.Random(seed)
        ranks = [
            trained([chosen.choices(range(samples), k=size) for _ in range(20)]) for _ in range(2)
        ]
        assert judge(ONCE, *ranks).status == "pass"


def seen(rows: Iterable[int], line: int = 9) -> dict[str, Any]:
    return {"kind": "evaluated", "rows": list(rows), "lines": [("train.py", line)]}


def evaluating(*evaluated: Records) -> list[Records]:
    """Two ranks that train on even and on odd samples of the first 64, and evaluate."""
    return [[*trained(cut(range(r, 64, 2))), *records] for r, records in enumerate(evaluated)]


test_held_out = judged_as(
    row(HELD_OUT, "fail", *evaluating([seen(range(1, 40, 2))], [seen(range(0, 40, 2))])),
    row(
        HELD_OUT,
        "fail",
        *evaluating(
            [seen(range(1, 40, 2)), seen(range(20), 7)], [seen(range(0, 40, 2)), seen(range(20), 7)]
        ),
    ),
    row(HELD_OUT, "pass", *evaluating([seen(range(64, 96, 2))], [seen(range(65, 96, 2))])),
    row(
        HELD_OUT, "not_applicable", *evaluating([seen(range(40))], [seen(range(40))])
    ),  # of the training
    row(
        HELD_OUT, "not_applicable", *evaluating([seen(range(0, 40, 2))], [seen(range(1, 40, 2))])
    ),  # before it is trained on
    row(
        HELD_OUT,
        "not_applicable",
        *evaluating([seen([*range(1, 40, 2), 2])], [seen(range(0, 40, 2))]),
    ),
    row(HELD_OUT, "not_applicable", *evaluating([seen([1, 3])], [seen([0, 2])])),  # by chance
    row(HELD_OUT, "not_covered", *evaluating([], [])),
    row(HELD_OUT, "not_applicable", evaluating([seen(range(40))])[0]),
)

SAVE = {"kind": "checkpoint", "op": "save", "after_step": 3, "to": "", "keys": []}


def going_on(samples: int) -> Run:
    """Six steps of two ranks, a checkpoint after the third."""
    starts = [[16 * k + 8 * rank for k in range(6)] for rank in (0, 1)]
    return run(
        *[
            [*sliced(*own[:3], samples=samples), SAVE, *sliced(*own, samples=samples)[9:]]
            for own in starts
        ]
    )


@cases(
    "samples, position, status",
    (1000, 48, "inconclusive"),  # the next samples, in a smaller batch
    (1000, 24, "fail"),  # three steps of one rank
    (1000, 72, "fail"),
    (1000, 500, "inconclusive"),  # an order of its own
    (40, 24, "inconclusive"),  # the epoch was over
)
def test_a_resume_with_a_smaller_batch(samples: int, position: int, status: str) -> None:
    records = [
        r | {"loss": 2.0} if r["kind"] == "micro" else r
        for r in sliced(position, position + 8, samples=samples)
    ]
    train, again = going_on(samples), run(records, role="reshard")
    found = judge(RESHARD, train, resume_full_precision=train, reshards=(again,))
    assert (found.status, found.required) == (status, status != "fail"), found.evidence


BUILT = Place(file="train.py", line=9, function="main", code="loader = DataLoader(data)")


def test_the_line_that_built_the_loader_of_the_training_batches() -> None:
    def loader(line: Place | None, at: float) -> dict[str, Any]:
        return {
            "kind": "loader_started",
            "samples": 8,
            "step": 1,
            "at_line": LINE,
            "made": line,
            "at": at,
        }

    batches = trained(cut(range(64)))
    evaluation = replace(BUILT, line=5)
    before = [loader(evaluation, -3.0), loader(BUILT, -2.0)]
    assert run([*before, *batches, loader(evaluation, 1e9)]).data_line() == BUILT
    assert run([loader(None, -2.0), *batches]).data_line() == LINE
    assert run([*batches]).data_line() == run([*batches]).line_of(Micro)
    validated = {
        **loader(evaluation, -1.0),
        "at_line": evaluation,
    }  # at the first step, behind the loop's own start
    assert (
        run([*before, validated, {"kind": "fed", "at_line": LINE}, *batches]).data_line() == BUILT
    )


ONE_ORDER = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=4)
    for (batch,) in loader:
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

main()
"""


def test_equal_batches_are_a_fault_where_the_loader_is_built(
    verify_script: Verify, tmp_path: Path
) -> None:
    (finding,) = verify_script(
        written(tmp_path, ONE_ORDER), ("same-data-on-every-rank",), steps=3
    ).findings
    assert finding.status == "fail"
    assert finding.location is not None
    assert finding.location.code.startswith("loader = DataLoader(")


BATCHES = """
def forward(x, look):
    return look(x)

def loss_of(batch, look):
    return forward(batch["x"], look)

def bound(make, look):
    batch = None
    for step in range(1):
        batch = {"x": make()}
        return loss_of(batch, look)

def unpacked(make, look):
    for x, y in [(make(), 0)]:
        return forward(x, look)

def passed(make, look):
    return loss_of({"x": make()}, look)

def sliced(make, look):
    data = make()
    batch = data[:1]
    return look(batch[:, :-1])
"""


@pytest.mark.parametrize(
    "how, code",
    [
        ("bound", "batch = {"),
        ("unpacked", "for x, y in"),
        ("passed", "return loss_of({"),
        ("sliced", "batch = data"),
    ],
)
def test_where_a_batch_comes_into_the_script(tmp_path: Path, how: str, code: str) -> None:
    script = written(tmp_path, BATCHES)
    space: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), space)
    session = SimpleNamespace(frames=Frames(str(tmp_path)))
    place = space[how](lambda: torch.zeros(2, 2), lambda x: origin_of(session, [x]))
    assert (place.function, place.code[: len(code)]) == (how, code)


@cases(
    "first, second, alone, status",
    ((0, 1, 2, 3), (3, 1, 2, 0), (8, 9), "fail"),
    ((0, 1, 2, 3), (0, 1, 2, 3), (8, 9), "pass"),
    (
        (0, 1, 2, 3),
        (3, 1, 2, 0),
        (1, 2),
        "pass",
    ),  # the samples are those of one process: places in a cache
    ((0, 1, 2, 9), (9, 1, 2, 0), (8, 9), "not_applicable"),  # no vocabulary
)
def test_ranks_number_words(first: Rows, second: Rows, alone: Rows, status: str) -> None:
    def numbered(numbers: Rows, rows: Rows) -> Records:
        entries = zip("abcd", numbers, strict=True)
        words = {
            f"data.words['{text}']": {"holder": "dataset", "value": n, "dtype": "int"}
            for text, n in entries
        }
        return [{"kind": "state", "step": 1, "values": words}, *trained([rows])]

    evidence = Evidence(
        train=run(numbered(first, (1,)), numbered(second, (2,))), single=run(trained([alone]))
    )
    found = judge("vocabulary-of-one-rank", evidence)
    assert (found.status, "'a' the numbers 0, 3" in found.evidence) == (
        status,
        status == "fail",
    ), found.evidence


READER = """
class Reader:
    def following(self):
        return self.make(), 0

    def __iter__(self):
        yield self.following()

def batches(reader):
    yield reader.following()
"""
READS = """
from reader import Reader, batches

def called(reader, look):
    x, y = reader.following()
    return look(x)

def looped(reader, look):
    for _, (x, y) in enumerate(reader):
        return look(x)

def generated(reader, look):
    for x, y in batches(reader):
        return look(x)

def by_hand(reader, look):
    stream = batches(reader)
    x = next(stream)[0]
    return look(x)
"""


@cases(
    "how, maker",
    ("called", "following"),
    ("looped", "__iter__"),
    ("generated", "batches"),
    ("by_hand", "batches"),
)
def test_the_function_that_made_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, maker: str
) -> None:
    written(tmp_path, READER).rename(tmp_path / "reader.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "reader", raising=False)
    script = written(tmp_path, READS)
    space: dict[str, Any] = {}
    exec(compile(script.read_text(), str(script), "exec"), space)
    reader = space["Reader"]()
    reader.make = lambda: torch.zeros(2)
    session = SimpleNamespace(frames=Frames(str(tmp_path)))
    place = space[how](reader, lambda x: origin_of(session, [x]))
    assert (place.function, [(Path(line.file).name, line.function) for line in place.through]) == (
        how,
        [("reader.py", maker)],
    )


@cases(
    "value, known",
    ({"ash": 1, "elm": 0, "oak": 2}, 3),
    ({f"word {n}": n for n in range(500)}, 64),  # the first are enough
    ({"a": None, "b": 0, "c": 1}, 0),
    ({"a": 0, "b": 0, "c": 2}, 0),
    ({"a": False, "b": True}, 0),
    ({0: 0, 1: 1}, 0),
    ({"step": 7}, 0),
    (["ash", "elm"], 0),
)
def test_what_is_a_vocabulary(value: object, known: int) -> None:
    assert len(vocabulary(value)) == known


@pytest.mark.parametrize("kind", [torch.Generator, random.Random])
def test_the_state_of_a_random_generator_is_a_number(kind: type[Any]) -> None:
    one, other = kind(), kind()
    for made in (one, other):
        made.manual_seed(1) if kind is torch.Generator else made.seed(1)
    known = stream(one)
    assert known is not None and stream(other) == known
    torch.rand(1, generator=one) if kind is torch.Generator else one.random()
    assert stream(one) != known and stream(torch.zeros(3)) is stream(random.SystemRandom()) is None


class Shard:
    """A share of a data set, as long as that, which may have no length."""

    def __init__(self, dataset: object) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


@cases("dataset, samples", ([1, 2], 2), (Shard([1, 2, 3]), 3), (Shard(iter([])), 0), (iter([]), 0))
def test_the_length_of_a_data_set(dataset: object, samples: int) -> None:
    assert length(dataset) == samples
