"""How a run is compared with an oracle, and how the difference is reported."""

import math

from ...analysis.comparison import (
    Limits,
    agrees,
    compare,
    first_updates_apart,
    incomparable,
    limits,
    parted,
    undecided,
    unlike,
    without_gradients,
)
from ...analysis.layers import first_layer
from ...analysis.localise import meaning, part, since, where
from ...analysis.scaling import clip_was_reached
from ...trace.events import Micro, Step, Stepped, Stress, ToEmpty
from ..base import Evidence, Finding, Rule, Run, count, some

UNREPRODUCIBLE = 0.05
_ON_SHARDS = (
    "Compute what changes gradients or weights (a clip, an optimizer) on whole DTensors, never on"
    " `to_local()`."
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
}  # of the original there is none


class OracleRule(Rule):
    """A rule that compares the full-precision run with an oracle, and so sees a difference and not
    its cause.
    """

    names_a_cause = False
    needs = frozenset({"train", "full_precision", "reference", "perturbed", "single"})


def judge_against(
    rule: Rule, evidence: Evidence, role: str, label: str, same_batch: str = ""
) -> Finding:
    """Compare the full-precision run with an oracle.

    `same_batch`: the advice where their global batches differ.
    """
    run: Run | None = evidence.full_precision
    oracle = evidence.by_role.get(role)
    if (
        run
        and oracle
        and run.steps()
        and oracle.steps()
        and same_batch
        and not run.same_batch(1, oracle)
    ):
        mine, theirs = run.global_batch(1).total(), oracle.global_batch(1).total()
        if mine != theirs and not agrees(evidence, rule.name, run, oracle, role, label):
            samples = (
                f"{label} takes {count(theirs, 'sample')} a step, {run.world_size} ranks take"
                f" {mine}"
            )
            return rule.unknown(f"{samples}: {same_batch}")
    if run is None or not run.completed:
        return rule.unknown(
            evidence.missing.get("full_precision", "the train run did not complete")
        )
    if oracle is None:
        return rule.unknown(evidence.missing.get(role, f"no {role} run was made"))
    if reason := unlike(run, oracle, role, label):
        return rule.unknown(reason)
    found, limit, step = compare(run, oracle), limits(evidence, rule.name), parted(run, oracle)
    same_numbers = found.finite and found.update_size > 0.0 and limit.agree(found.measures)
    if not same_numbers and (
        reason := incomparable(run, oracle, role, label) or ""
    ):  # padded otherwise, they are the same samples
        return rule.unknown(reason)
    until = min(run.steps(), oracle.steps())
    if step is not None and not same_numbers:
        found, until = compare(run, oracle, step - 1), step - 1
    losses = [loss for loss in oracle.losses if loss is not None]
    if found.update_size == 0.0:
        return rule.unknown("no weight changed in any step: nothing to compare")
    if not found.finite:
        return rule.unknown(_not_finite(evidence, run))
    if not oracle.reduces_loss() and losses and losses[-1] >= losses[0]:
        return rule.unknown(
            "the loss did not fall and the updates do not reduce it to first order: nothing is"
            " learned"
        )
    if limit.noise > UNREPRODUCIBLE:
        moved = f"weights that differ in the last place move the losses by {limit.noise:.0%}"
        return rule.unknown(f"not reproducible: {moved}")
    measures, allowed = found.measures, limit.allowed
    over = {name: measures[name] for name in limit.over(measures)}
    if (
        limit.agree(measures)
        and label in _SECOND
        and (hidden := first_updates_apart(evidence, rule.name))
    ):
        first, (value, most) = next(iter(hidden.items()))
        which = (
            f"the first update of {len(hidden)} of {count(len(run.parameters), 'parameter')}, first"
            f" {first}"
        )
        text = (
            f"differs from {label} in {which}: off by {value:.2g} relative (allowed {most:.1g}),"
            " from equal gradients"
        )
        text += "; in the sum of all it is hidden by the noise of others"
        return rule.failed(text, run.line_of(Step), measured=value, limit=most, fix=_ON_SHARDS)
    if limit.agree(measures):
        name = max(measures.keys() - over, key=lambda n: measures[n] / allowed[n])
        loss = "loss of another scale" if over else f"loss within {measures['loss']:.1e}"
        others = (
            f" (from step {step} on the two were given other samples)" if step == until + 1 else ""
        )
        if oracle is evidence.single and evidence.kink is not None:
            jump = f"the gradient of step {evidence.kink} jumps from equal weights and losses"
            others = (
                f" ({jump}, as at the kink of a ReLU or a maximum: later steps are not compared)"
            )
        text = (
            f"agrees with {label} for {count(until, 'step')}{others}: {loss}, gradient norm"
            f" {measures['gradient norm']:.1e}, update {measures['update']:.1e};"
            f" {substance(evidence, run)}"
        )
        return rule.passed(text, measured=measures[name], limit=allowed[name])
    name = max(over, key=lambda n: measures[n] / allowed[n])
    if not limit.differ(measures):
        return rule.unknown(f"against {label}: {undecided(name, over[name], limit)}")
    parting = part(run, oracle, allowed)
    apart = (
        f"{where(parting)}; {name} off by {over[name]:.2g} relative (allowed {allowed[name]:.1g})"
    )
    same_script = None if label == "the original" else oracle
    text = (
        f"{apart};"
        f" {meaning(parting, run, label, _second(evidence, run, label, limit), same_script, allowed)}"
    )
    line = run.line_of(Micro if parting.stage in ("gradient", "loss") else Step)
    fix = {}
    if same_script and parting.stage in ("clip", "optimizer"):
        fix = {"fix": _SUMMED if without_gradients(run) else _ON_SHARDS}
    elif same_script and parting.stage == "later" and since(parting, run, same_script, label):
        fix = {"fix": _NAMED}
    if label == "DDP" and (module := first_layer(evidence)) is not None:
        text, line, fix = f"{apart}; {module[0]}", module[1] or line, {"fix": _MODULE}
    return rule.failed(
        f"differs from {label} {text}", line, measured=over[name], limit=allowed[name], **fix
    )


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
    other = evidence.by_role.get(role)
    if other is None or incomparable(run, other, role, name) is not None:
        return None
    measures = compare(run, other).measures
    return "agrees" if limit.agree(measures) else "differs" if limit.differ(measures) else None


def substance(evidence: Evidence, run: Run) -> str:
    """What a pass rests on: the loss fell, gradients and weights changed, the clip was reached, the
    data differ.
    """
    losses = [loss for loss in run.losses if loss is not None]
    texts = [f"the loss went from {losses[0]:.4g} to {losses[-1]:.4g}"] if len(losses) > 1 else []
    trainable = [name for name, entries in run.parameters.items() if entries[0].trainable]
    steps = range(1, run.steps() + 1)
    fed = {
        n
        for s in steps
        for n, g in run.whole(Step, "grads_at_step", s).items()
        if g is not None and g[0] > 0.0
    }
    idle = [name for name in trainable if name not in fed]
    all_fed = f"all {len(trainable)} trainable parameters got gradients"
    texts.append(f"{some(idle)} never got a gradient" if idle else all_fed)
    moved = {
        n for s in steps for r in run.at_step(Stepped, s) for n, m in r.moved.items() if m[0] > 0.0
    }
    if still := [name for name in trainable if name in fed and name not in moved]:
        texts.append(f"{some(still)} did not change")
    if _clips(evidence.provoked) or (
        evidence.train is not None and clip_was_reached(evidence.train)
    ):
        norms = [(run.grad_norm(s), run.grad_norm(s, "grads_at_step")) for s in steps]
        reached = any(a is not None and b is not None and b < 0.999 * a for a, b in norms)
        texts.append(
            "the clip was reached" if reached else "the clip was never reached in these steps"
        )
    if run.world_size > 1 and any(rows := run.rows(1)) and all(r == rows[0] for r in rows):
        texts.append("all ranks saw the same samples")
    return ", ".join(texts)


def _clips(provoked: Run | None) -> bool:
    """Whether gradients 1e6 times as large were scaled down before the step."""
    record = provoked.traces[0].first(Stress) if provoked is not None and provoked.traces else None
    return record is not None and any(
        ss < 0.9 * bb for bb, _, ss in record.products.values() if bb > 0.0
    )
