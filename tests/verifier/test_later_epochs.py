"""Samples once per epoch, in the later epochs of the survey run."""

import random
from typing import Any

from records import LINE, judged_as, micro, model, row, run, step, stepped

RULE = "samples-once-per-epoch"
Records = list[dict[str, Any]]
Ranks = list[list[int]]


def trained(rank: int) -> Records:
    """A train run of four steps, in which nothing is wrong."""
    steps = ([micro(k, rows=(10 * k + rank,)), step(k), stepped(k)] for k in range(1, 5))
    return [model(), *(record for one in steps for record in one)]


TRAIN = (trained(0), trained(1))


def epoch(rows: list[int], begun: dict[str, Any], size: int = 4) -> Records:
    """What a rank records of an epoch that trains on these samples."""
    cut = [rows[start : start + size] for start in range(0, len(rows), size)]
    return [begun, *({"kind": "batch", "step": 1, "rows": r, "size": len(r)} for r in cut)]


def loader(samples: int = 32) -> dict[str, Any]:
    return {"kind": "loader_started", "samples": samples, "step": 1, "at_line": LINE}


def sampler(number: int, shift: int = 0) -> dict[str, Any]:
    fields = {"dataset": 0, "shuffle": True, "seed": 1, "samples": 16, "parts": 2, "at_line": LINE}
    return {"kind": "sampler", "epoch": number + shift, **fields}


def survey(*epochs: Ranks) -> dict[str, Any]:
    """Evidence of a survey run: for each epoch the samples of both ranks."""
    ranks = [[record for one in epochs for record in epoch(one[r], loader())] for r in (0, 1)]
    return {"survey": run(*ranks, role="survey")}


def dealt(*seeds: int, samples: int = 32) -> Ranks:
    """Each rank takes its part of an order: of one, or of its own."""
    orders = [random.Random(seed).sample(range(samples), samples) for seed in seeds]
    return [orders[rank % len(orders)][rank::2] for rank in (0, 1)]


def samplers(shift: int) -> dict[str, Any]:
    """The ranks' samplers are at epochs `shift` apart from the second epoch on."""
    ranks = [
        [*epoch(dealt(0)[r], sampler(0)), *epoch(dealt(1)[r], sampler(1, r * shift))]
        for r in (0, 1)
    ]
    return {"survey": run(*ranks, role="survey")}


def drawn(*seeds: int) -> Ranks:
    """Each rank draws its samples with replacement."""
    return [random.Random(seed).choices(range(32), k=16) for seed in seeds]


FIRST, OWN = dealt(0), dealt(1, 2)
SAME = [dealt(1)[0]] * 2
NEW = [[row + 100 for row in own] for own in OWN]  # samples that are augmented, or a stream
PADDED = [[*own, first] for own, first in zip(FIRST, (0, 1), strict=True)]
PAIRS = [[row // 2 for row in own] for own in FIRST]  # samples that are twice in the data
NAMED = ("epoch 2 of the survey run", "of 32 samples", "by several ranks", "by none")

test_the_survey = judged_as(
    row(RULE, "fail", *TRAIN, at=LINE, names=NAMED, **survey(FIRST, OWN)),
    row(RULE, "fail", *TRAIN, at=LINE, names=("16 of 32",), **survey(FIRST, SAME)),
    row(RULE, "fail", *TRAIN, names=("epoch 3",), **survey(FIRST, dealt(1), OWN, dealt(2))),
    row(RULE, "fail", *TRAIN, at=LINE, names=("epochs [1, 2]",), **samplers(1)),
    row(RULE, "pass", *TRAIN, **samplers(0)),
    row(
        RULE, "pass", *TRAIN, names=("3 epochs of the whole script",), **survey(FIRST, *[FIRST] * 2)
    ),
    row(RULE, "pass", *TRAIN, **survey(FIRST, dealt(1), dealt(2))),
    # a later epoch that is shorter: of the last, or of what a budget allows
    row(RULE, "pass", *TRAIN, **survey(FIRST, [own[:8] for own in SAME])),
    # with replacement, from the first epoch on or from the second
    row(RULE, "pass", *TRAIN, **survey(drawn(1, 2), drawn(3, 4))),
    row(RULE, "pass", *TRAIN, **survey(FIRST, drawn(3, 4))),
    row(RULE, "pass", *TRAIN, **survey(FIRST, NEW)),
    # each rank draws its own part, and shares some from the first epoch on
    row(RULE, "pass", *TRAIN, **survey(OWN, dealt(3, 4), dealt(5, 6), dealt(7, 8))),
    # what is drawn for one batch is no epoch
    row(RULE, "pass", *TRAIN, **survey(*([own[:4] for own in one] for one in (FIRST, SAME)))),
    row(RULE, "pass", *TRAIN, **survey(PADDED, [[*own, 2] for own in dealt(1)])),
    row(RULE, "pass", *TRAIN, **survey(PAIRS, [[row // 2 for row in own] for own in OWN])),
    # four samples that ranks share are too few
    row(RULE, "pass", *TRAIN, **survey(FIRST, [FIRST[0], [*FIRST[0][:3], *FIRST[1][3:]]])),
    row(RULE, "pass", *TRAIN, survey=None),
)
