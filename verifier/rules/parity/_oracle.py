"""How a run is compared with an oracle, and how the difference is reported."""

import math
from collections.abc import Callable

from ...analysis.comparison import (
    compare,
    divided,
    incomparable,
    loss_apart,
    unlike,
    without_gradients,
)
from ...analysis.custom_backwards import own_backwards
from ...analysis.layers import first_layer
from ...analysis.limits import Limits, agrees, first_updates_apart, undecided
from ...analysis.localise import (
    Parting,
    counted_times,
    exchanged,
    meaning,
    other_rates,
    part,
    reduced_after_backward,
    since,
    where,
)
from ...analysis.loss_terms import OWN_COUNT, SUM, differing_term
from ...tolerances import UNREPRODUCIBLE
from ...trace.events import Micro, Place, Step, ToEmpty
from ..base import Evidence, Finding, Rule, Run, count, some
from ._against import Against
from ._substance import substance

_ON_SHARDS = (
    "Compute what changes gradients or weights (a clip, an optimizer) on whole DTensors, never on"
    " `to_local()`."
)
_COUNTED = (
    "All-reduce the squared norm over the ranks that hold other shards alone"
    " (`mesh['dp_shard'].get_group()`), not over replicas; `torch.nn.utils.clip_grad_norm_` does."
)
_PARTS = (
    "Reduce sums, squares and counts over the ranks that have parts of a sample, and compute from"
    " these what belongs to the whole sample; a mean of variances is not the variance."
)
_OF_TERM = {
    SUM: (
        "Divide this term by a number that grows with the samples (of tokens, of samples), so that"
        " the mean over the ranks is that of one process."
    ),
    OWN_COUNT: (
        "Divide by the number of all ranks (`dist.all_reduce(count)`), and multiply by how many"
        " ranks there are, by which FSDP divides."
    ),
}
_BACKWARD = (
    "Look at {}: where ranks share a value or have parts of it, its gradient is the sum of what all"
    " of them derive, all-reduced after the last part is added."
)
_RATES = (
    "Make the schedule's number of steps of the whole training, samples over the global batch: the"
    " length of a loader with a DistributedSampler is one rank's share already."
)
_NAMED = (
    "Make what is named here of the samples of all ranks and of whole tensors, as one process does."
)
_MODULE = (
    "Look at what this forward reads: parameters that were written while gathered (which are freed"
    " again), inputs that `mp_policy` casts, values of one rank's shards."
)
_SUMMED = (
    "Sum losses over all ranks, and draw directions for whole parameters, before they change"
    " weights."
)
_SECOND = {
    "DDP": ("single", "one process"),
    "one process": ("reference", "DDP"),
}  # of the original there is none: only its result is comparable


class OracleRule(Rule):
    """A rule that compares the full-precision run with an oracle, and so sees a difference and not
    its cause.
    """

    names_a_cause = False
    in_windows = True
    needs = frozenset({"train", "full_precision", "reference", "perturbed", "single"})


def judge_against(
    rule: Rule, evidence: Evidence, role: str, label: str, same_batch: str = ""
) -> Finding:
    """Compare the full-precision run with an oracle.

    `same_batch`: the advice where their global batches differ.
    """
    run: Run | None = evidence.full_precision
    oracle = evidence.of_role(role)
    pair = None
    if run is not None and oracle is not None:
        pair = Against(rule, evidence, run, oracle, role, label, same_batch)
        if reason := _other_batch(pair):
            return rule.unknown(reason)
    if run is None or not run.completed:
        return rule.unknown(
            evidence.missing.get("full_precision", "the train run did not complete")
        )
    if pair is None:
        return rule.unknown(evidence.missing.get(role, f"no {role} run was made"))
    if reason := next(filter(None, (case(pair) for case in NOT_COMPARED)), ""):
        return rule.unknown(reason)
    found = (case(pair) for case in COMPARED)
    return next(filter(None, found), None) or _differs(pair)


def _other_batch(pair: Against) -> str:
    """A fixed batch of each rank is a smaller one in one process: another batch, not another
    result. If all numbers agree all the same, rows were only cut otherwise (packed documents).
    """
    run, oracle, label = pair.run, pair.oracle, pair.label
    if not (run.steps() and oracle.steps() and pair.advice) or run.same_batch(1, oracle):
        return ""
    mine, theirs = run.global_batch(1).total(), oracle.global_batch(1).total()
    if mine == theirs or agrees(pair.evidence, pair.rule.name, run, oracle, pair.role, label):
        return ""
    took = f"{label} takes {count(theirs, 'sample')} a step, {run.world_size} ranks take {mine}"
    return f"{took}: {pair.advice}"


def _unlike(pair: Against) -> str:
    return unlike(pair.run, pair.oracle, pair.role, pair.label)


def _other_samples(pair: Against) -> str:
    """Other samples in step 1, unless all numbers are the same: then they were only padded
    otherwise.
    """
    if pair.same_numbers:
        return ""
    return incomparable(pair.run, pair.oracle, pair.role, pair.label) or ""


def _no_update(pair: Against) -> str:
    """Without an update two wrong runs agree, too."""
    still = pair.found.update_size == 0.0
    return "no weight changed in any step: nothing to compare" if still else ""


def _infinite(pair: Against) -> str:
    return "" if pair.found.finite else _not_finite(pair.evidence, pair.run)


def _joined_otherwise(pair: Against) -> str:
    """Parts that the script has divided itself are joined by a guess: another first loss may be
    that of another order.
    """
    parts = divided(pair.run, pair.oracle)
    if not parts or loss_apart(pair.run, pair.oracle, 1) <= pair.limits.allowed["loss"]:
        return ""
    which = f"each rank holds its own part of {some(sorted(parts))}"
    return (
        f"{which}: one process that has the parts one behind the other has another first loss, as"
        " where they are divided otherwise"
    )


def _nothing_learned(pair: Against) -> str:
    """Runs that learn nothing may agree by chance; the loss of a GAN may rise, but its updates
    reduce it to first order.
    """
    losses = [loss for loss in pair.oracle.losses if loss is not None]
    if pair.oracle.reduces_loss() or not losses or not losses[-1] >= losses[0]:
        return ""
    return (
        "the loss did not fall and the updates do not reduce it to first order: nothing is learned"
    )


def _unreproducible(pair: Against) -> str:
    noise = pair.limits.noise
    if not noise > UNREPRODUCIBLE:
        return ""
    moved = f"weights that differ in the last place move the losses by {noise:.0%}"
    return f"not reproducible: {moved}"


# Why the two cannot be compared, in the order in which it is asked: what cannot be read of a pair
# is excluded by the cases before it.
NOT_COMPARED: tuple[Callable[[Against], str], ...] = (
    _unlike,
    _other_samples,
    _no_update,
    _infinite,
    _joined_otherwise,
    _nothing_learned,
    _unreproducible,
)


def _hidden_update(pair: Against) -> Finding | None:
    """All measures agree, but the first update of a parameter does not.

    A trust ratio of local shards was hidden by the noise of parameters that begin at zero (exam
    round 8, ga_02_vision_lamb).
    """
    if not pair.limits.agree(pair.measures) or pair.label not in _SECOND:
        return None
    hidden = first_updates_apart(pair.evidence, pair.rule.name)
    if not hidden:
        return None
    first, (value, most) = next(iter(hidden.items()))
    all_of_them = count(len(pair.run.parameters), "parameter")
    text = (
        f"differs from {pair.label} in the first update of {len(hidden)} of {all_of_them}, first"
        f" {first}: off by {value:.2g} relative (allowed {most:.1g}), from equal gradients; in the"
        " sum of all it is hidden by the noise of others"
    )
    line = pair.run.line_of(Step)
    return pair.rule.failed(text, line, measured=value, limit=most, fix=_ON_SHARDS)


def _agrees(pair: Against) -> Finding | None:
    """All measures agree, or all but the loss: a script may scale its gradients after backward."""
    if not pair.limits.agree(pair.measures):
        return None
    scaled = bool(pair.limits.over(pair.measures))
    measures, evidence, until = pair.measures, pair.evidence, pair.until
    loss = "loss of another scale" if scaled else f"loss within {measures['loss']:.1e}"
    others = ""
    if pair.parted == until + 1:
        others = f" (from step {pair.parted} on the two were given other samples)"
    # At the kink of a ReLU rounding alone makes a gradient jump: one process is compared up to the
    # step before (exam round 9, hd_08_lora_ema).
    if pair.oracle is evidence.single and evidence.kink is not None:
        jump = f"the gradient of step {evidence.kink} jumps from equal weights and losses"
        others = f" ({jump}, as at the kink of a ReLU or a maximum: later steps are not compared)"
    text = (
        f"agrees with {pair.label} for {count(until, 'step')}{others}: {loss}, gradient norm"
        f" {measures['gradient norm']:.1e}, update {measures['update']:.1e};"
        f" {substance(evidence, pair.run)}"
    )
    return pair.rule.passed(text, **pair.off(pair.worst(over=False)))


def _undecided(pair: Against) -> Finding | None:
    """Where the noise of the script was not measured, a small difference is no failure."""
    if pair.limits.differ(pair.measures):
        return None
    name = pair.worst(over=True)
    text = undecided(name, pair.measures[name], pair.limits)
    return pair.rule.unknown(f"against {pair.label}: {text}")


# What a comparison shows, in the order in which it is asked; else the two differ.
COMPARED: tuple[Callable[[Against], Finding | None], ...] = (_hidden_update, _agrees, _undecided)


def _differs(pair: Against) -> Finding:
    """Where the run first parts from the oracle."""
    run, label, evidence, allowed = pair.run, pair.label, pair.evidence, pair.limits.allowed
    name = pair.worst(over=True)
    parting = part(run, pair.oracle, allowed)
    apart = (
        f"{where(parting)}; {name} off by {pair.measures[name]:.2g} relative (allowed"
        f" {allowed[name]:.1g})"
    )
    same_script = None if label == "the original" else pair.oracle
    second = _second(evidence, run, label, pair.limits)
    why = meaning(parting, run, label, second, same_script, allowed)
    line = run.line_of(Micro if parting.stage in ("gradient", "loss") else Step)
    fix: dict[str, str] = {}
    if same_script is not None:
        line, why, fix = _edit(pair, parting, second, line, why)
    if label == "DDP" and (module := first_layer(evidence)) is not None:
        why, line, fix = module[0], module[1] or line, {"fix": _MODULE}
    text = f"differs from {label} {apart}; {why}"
    return pair.rule.failed(text, line, **pair.off(name), **fix)


def _edit(
    pair: Against, parting: Parting, second: str | None, line: Place | None, why: str
) -> tuple[Place | None, str, dict[str, str]]:
    """(the line to edit, why the two differ, the fix if it is not the rule's own), from the line
    and the reason of the stage at which they part.
    """
    run, oracle, label = pair.run, pair.oracle, pair.label
    if parting.stage in ("clip", "optimizer"):
        if second == "agrees" and counted_times(parting):
            return reduced_after_backward(run) or line, why, {"fix": _COUNTED}
        if label != "DDP" and other_rates(parting, run, oracle, label, second):
            return line, why, {"fix": _RATES}
        return line, why, {"fix": _SUMMED if without_gradients(run) else _ON_SHARDS}
    if second == "agrees" and parting.factor is None:
        own = own_backwards(pair.evidence.sources)
        if own and exchanged(parting, run, oracle, pair.limits.allowed):
            names = some([f"`{one.function}` (line {one.line})" for one in own], 3)
            return own[0] if len(own) == 1 else line, why, {"fix": _BACKWARD.format(names)}
    if second == "agrees" and parting.factor is None and run.cut_within(1, oracle):
        return line, why, {"fix": _PARTS}
    if parting.stage == "later" and since(parting, run, oracle, label):
        return line, why, {"fix": _NAMED}
    if (
        label == "one process"
        and parting.stage in ("gradient", "loss")
        and (term := differing_term(run, oracle, pair.evidence.sources)) is not None
    ):
        return term.line, term.text, {"fix": _OF_TERM[term.kind]} if term.kind else {}
    return line, why, {}


def _not_finite(evidence: Evidence, run: Run) -> str:
    """Since when numbers are not finite, and what would show why."""
    step = next(
        (n for n, loss in enumerate(run.losses, 1) if loss is not None and not math.isfinite(loss)),
        None,
    )
    text = (
        "losses or gradients are not"
        f" finite{'' if step is None else f', the loss from step {step} on'}"
    )
    if evidence.provoked is not None or not run.all(ToEmpty):
        return text
    return (
        f"{text}: the script calls to_empty, and whether all of that memory is filled is shown"
        " without --quick"
    )


def _second(evidence: Evidence, run: Run, label: str, limit: Limits) -> str | None:
    """Whether the other oracle "agrees" or "differs"; None if it cannot decide."""
    role, name = _SECOND.get(label, ("", ""))
    other = evidence.of_role(role)
    if other is None or incomparable(run, other, role, name) is not None:
        return None
    measures = compare(run, other).measures
    return "agrees" if limit.agree(measures) else "differs" if limit.differ(measures) else None
