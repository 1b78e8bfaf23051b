"""The same order in each epoch, as the whole script shows it in the survey run."""

from typing import Any

from records import LINE, judged_as, micro, model, row, run, step, stepped

RULE = "set-epoch-missing"
TRAIN = [model(), micro(), step(), stepped()]
Records = list[dict[str, Any]]
EPOCH = ([1, 2], [3, 4], [5, 6])


def batches(*given: list[int]) -> Records:
    return [{"kind": "batch", "step": 1 + k, "rows": r, "size": 2} for k, r in enumerate(given)]


def order(digest: int = 7, samples: int = 3) -> Records:
    return [{"kind": "order", "samples": samples, "digest": digest, "at_line": LINE}]


def sampler(epoch: int = 0, shuffle: bool = True) -> Records:
    fields = {"dataset": 0, "epoch": epoch, "seed": 1, "samples": 6, "parts": 2}
    return [{"kind": "sampler", **fields, "shuffle": shuffle, "at_line": LINE}]


def survey(*parts: Records) -> dict[str, Any]:
    """Evidence of a survey run of one rank."""
    return {"survey": run([one for part in parts for one in part], role="survey")}


FIRST, OTHER = batches(*EPOCH), batches(*reversed(EPOCH))
SUBSET = [*order(samples=40)]  # of an evaluation, say: not as many as there are batches or samples
AGAIN = ("same order, 2 epochs", "comes out the same")

test_the_survey = judged_as(
    row(RULE, "fail", TRAIN, at=LINE, names=AGAIN, **survey(order(), FIRST, order(), FIRST)),
    row(RULE, "fail", TRAIN, at=LINE, **survey(order(samples=6), FIRST, order(samples=6), FIRST)),
    row(RULE, "fail", TRAIN, at=LINE, **survey(sampler(), FIRST, sampler(), FIRST)),
    row(RULE, "fail", TRAIN, at=LINE, **survey(*(order(), FIRST) * 3, order(), FIRST[:1])),
    row(RULE, "not_applicable", TRAIN, **survey(order(), FIRST, order(8), OTHER)),
    row(RULE, "not_applicable", TRAIN, **survey(order(), FIRST, order(), OTHER)),
    # one epoch and a part of the next
    row(RULE, "not_applicable", TRAIN, **survey(order(), FIRST, order(), FIRST[:2])),
    # a list of batches that was shuffled once
    row(RULE, "not_applicable", TRAIN, **survey(order(), FIRST, FIRST, FIRST)),
    row(RULE, "not_applicable", TRAIN, **survey(SUBSET, FIRST, SUBSET, FIRST)),
    row(RULE, "not_applicable", TRAIN, **survey(*(sampler(shuffle=False), FIRST) * 2)),
    # a fixed permutation in each forward, and a single batch
    row(RULE, "not_applicable", TRAIN, **survey(*(order(), FIRST[:1]) * 6)),
    # of an earlier version, or nothing that distinguishes samples
    row(RULE, "not_applicable", TRAIN, **survey(order(), order())),
    row(RULE, "not_applicable", TRAIN, survey=None),
)
