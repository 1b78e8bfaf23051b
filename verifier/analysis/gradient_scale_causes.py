"""What a constant factor on the gradients can mean.

With as many ranks as micro-batches one factor has several readings. A reading is ruled out only by
evidence: by the weights of the losses in backward, and by the same script on another number of
ranks.
"""

import math
from dataclasses import dataclass

from ..tolerances import NEAR
from ..trace import Run
from ..trace.events import Micro, Step

NOT_DIVIDED, DIVIDED_TWICE = "not divided", "divided twice"


@dataclass(frozen=True)
class Reading:
    """One meaning of a factor.

    `cause`: "ranks", "not divided" or "divided twice" (by the micro-batches), or "both".
    """

    factor: float
    cause: str
    text: str


def readings(factor: float, run: Run, oracle: Run | None = None) -> list[Reading]:
    """Every reading of a factor on the gradients of step 1 that the records do not rule out.

    `oracle`: the same script in another run; None where the factor is against what is right.
    """
    theirs = micro_batches(oracle) if oracle is not None else 1
    sizes = sorted(
        # Ranks of tensor parallelism share samples: the sum may be over all ranks and the divisor
        # the data ranks, or both (test_ranks_that_share_their_samples_do_not_divide).
        {len(run.data_ranks) or run.world_size, run.world_size}
    )  # of them, TP ranks share their samples
    known = [r for size in sizes for r in _known(size, micro_batches(run), theirs)]
    found = [r for r in dict.fromkeys(known) if near(factor, r.factor)]
    if len(found) < 2:
        return found
    # A reading is dropped only by evidence; if all are, the records contradict one another and all
    # stay.
    return [r for r in found if r.cause not in _ruled_out(run, oracle)] or found


def words(found: list[Reading]) -> str:
    """The readings in one sentence; several are alternatives between which these runs cannot
    distinguish.
    """
    texts = list(dict.fromkeys(r.text for r in found))
    if len(texts) < 2:
        return "".join(texts)
    return f"{', or '.join(texts)} (another --nproc shows which)"


def micro_batches(run: Run) -> int:
    """The number of micro-batches of step 1."""
    return max((len(micros) for micros in run.micros(1)), default=0) or 1


def near(a: float, b: float) -> bool:
    """Whether a factor is this one, up to rounding."""
    return abs(a / b - 1.0) <= NEAR


def weight(micro: Micro) -> tuple[float, int] | None:
    """(how many times the mean cross entropy of a micro-batch is in its loss, its number of
    targets).

    Cross entropies of chunks are one: together they have no more targets than the micro-batch has
    tokens, as those of several heads would, and each target weighs the same.
    """
    if (
        len(micro.criteria) > 1
        # Chunks of one loss have together no more targets than tokens; several heads have more and
        # are not weighed (torchtune, trl: a cross entropy in chunks (field)).
        and not 0 < sum(entropy.targets for entropy in micro.criteria) <= micro.tokens
    ):
        return None
    weights, valid = [], []
    for entropy in micro.criteria:
        if entropy.gradient is None or entropy.reduction not in ("mean", "sum"):
            return None
        # A chunk whose targets are all ignored weighs nothing; as a mean it would be 0 / 0
        # (torchtune, trl: loss in chunks).
        if entropy.valid:  # a chunk may have none
            weights.append(entropy.gradient * (entropy.valid if entropy.reduction == "sum" else 1))
            valid.append(entropy.valid)
    per_target = [own / number for own, number in zip(weights, valid, strict=True)]
    if not per_target or any(
        abs(one - per_target[0]) > NEAR * abs(per_target[0]) for one in per_target
    ):
        return None
    return sum(weights), sum(valid)


def total_weight(run: Run) -> float | None:
    """Sum of weights over micro-batches and ranks of the first step, by FSDP's divisor: 1 for a
    mean over the step.

    None where the weights are not known, or where optimizers have losses of their own: they step
    one after the other, or hold models apart.
    """
    # Mutual learning: each loss is the mean of its own model, so their weights do not add up to 1
    # (test_peers_that_learn_from_one_another (mutual learning: r2 e_15, r9 ha_12)).
    if _models_apart(run) or _parts_elsewhere(run):
        return None
    all_ranks = run.consumed(1)
    stepped = [min((step.seq for step in trace.of(Step)), default=math.inf) for trace in run.traces]
    if any(
        # A backward after the first step is that of another optimizer in turn: its loss has a mean
        # of its own (exam r3 g_17_adapters_round_robin, h_20_greedy_layers).
        micro.seq > end
        for micros, end in zip(all_ranks, stepped, strict=True)
        for micro in micros
    ):
        return None
    per_rank = [
        [weight(m) for m in all_ranks[rank]] for rank in run.data_ranks if rank < len(all_ranks)
    ]
    if not per_rank or any(not w or None in w for w in per_rank):
        return None
    return sum(w[0] for weights in per_rank for w in weights if w) / run.divisor


def _parts_elsewhere(run: Run) -> bool:
    """Whether ranks that FSDP does not average have samples of their own: parts of a sequence,
    whose gradients the script adds up itself (moe_seqpar_router).
    """
    rows = run.rows(1)
    known = [rows[rank] for rank in run.data_ranks if rank < len(rows)]
    return any(own and own not in known for own in rows)


def _models_apart(run: Run) -> bool:
    """Whether several optimizers make the first step, each of models that no other holds: a
    backward may be of one model alone.
    """
    roots = sorted((model.root for model in run.models), key=len, reverse=True)
    firsts = [record for record in run.places(Step) if record.step == 1]
    held = [
        {next((root for root in roots if name.startswith(root)), "") for name in one.held}
        for one in firsts
    ]
    return len(held) > 1 and sum(map(len, held)) == len(set().union(*held))


def _known(world: int, micros: int, theirs: int) -> list[Reading]:
    """The factors, other than 1, that a wrong scale gives against an oracle with `theirs`
    micro-batches.
    """
    more = f"{micros}" if theirs == 1 else f"{micros} (against {theirs})"
    found = [
        (float(world), "ranks", f"the sum over ranks is not divided by their number, {world}"),
        (1.0 / world, "ranks", f"the gradient is divided twice by the number of ranks, {world}"),
        (
            micros / theirs,
            NOT_DIVIDED,
            f"the loss is not divided by the number of micro-batches, {more}",
        ),
        (
            theirs / micros,
            DIVIDED_TWICE,
            f"the loss is divided twice by the number of micro-batches, {more}",
        ),
    ]
    if min(world, micros) > 1:
        found.append(
            (
                world * micros / theirs,
                "both",
                "a sum over ranks and micro-batches in place of a mean",
            )
        )
    return [Reading(*reading) for reading in found if not near(reading[0], 1.0)]


def _ruled_out(run: Run, oracle: Run | None) -> set[str]:
    """The causes that the weights of the losses exclude."""
    out: set[str] = set()
    if (total := total_weight(run)) is not None and near(total, 1.0):
        out |= {
            NOT_DIVIDED,
            DIVIDED_TWICE,
            "both",
        }  # the losses are right: the factor is applied after them
    if (
        oracle is None
        or (theirs := micro_batches(oracle)) == 1
        or (other := total_weight(oracle)) is None
    ):
        return out
    for cause, expected in ((NOT_DIVIDED, float(theirs)), (DIVIDED_TWICE, 1.0 / theirs)):
        if near(other, expected):
            return out | (
                {"ranks", NOT_DIVIDED, DIVIDED_TWICE} - {cause}
            )  # without the other ranks it is there too
    return out | {NOT_DIVIDED, DIVIDED_TWICE, "both"} if near(other, 1.0) else out
