"""How a run is compared with an oracle, and what is said of the difference."""

from __future__ import annotations

from ...analysis.comparison import Comparison, Limits, compare, incomparable, limits, undecided
from ...analysis.localise import meaning, part
from ...analysis.scaling import clip_was_reached
from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding
from ...trace import Run
from ...trace.events import Micro, Step, Stepped, Stress
from ..base import Rule

UNREPRODUCIBLE = 0.05


def judge_against(rule: Rule, evidence: Evidence, oracle: Run | None, role: str, label: str) -> Finding:
    """Compare the full-precision run with one oracle."""
    run = evidence.full_precision
    if run is None or not run.completed:
        return rule.unknown(evidence.missing.get("full_precision", "the train run did not complete"))
    if oracle is None:
        return rule.unknown(evidence.missing.get(role, f"no {role} run was made"))
    if (reason := incomparable(run, oracle, role, label)) is not None:
        return rule.unknown(reason)
    found = compare(run, oracle)
    if found.update_size == 0.0:
        return rule.unknown("no weight moved in any step, so equal weights prove nothing")
    if not found.finite:
        return rule.unknown("losses or gradients are not finite")
    losses = [loss for loss in oracle.losses if loss is not None]
    if not oracle.downhill() and losses and losses[-1] >= losses[0]:
        return rule.unknown(
            "the loss did not fall and the updates do not point downhill: equal runs that learn nothing prove nothing"
        )
    allowed = limits(evidence, rule.name)
    if allowed.noise > UNREPRODUCIBLE:
        return rule.unknown(
            f"weights one unit in the last place apart give losses {allowed.noise:.0%} apart: the script is not reproducible enough"
        )
    return _decide(rule, evidence, run, oracle, found, allowed, label)


def _decide(
    rule: Rule,
    evidence: Evidence,
    run: Run,
    oracle: Run,
    found: Comparison,
    limit: Limits,
    label: str,
) -> Finding:
    measures, allowed = found.measures, limit.allowed
    over = {name: value for name, value in measures.items() if not value <= allowed[name]}
    if not over:
        name = max(measures, key=lambda n: measures[n] / allowed[n])
        told = (
            f"{count(min(run.steps(), oracle.steps()), 'step')} as {label}: loss within {found.loss:.1e}, "
            f"gradient norm {found.grad_norm:.1e}, update {found.update:.1e}; {substance(evidence, run)}"
        )
        return rule.passed(told, measured=measures[name], limit=allowed[name])
    name = max(over, key=lambda n: over[n] / allowed[n])
    if not limit.differ(measures):
        return rule.unknown(f"against {label}: {undecided(name, over[name], limit)}")
    told = "; ".join(f"{n} differs by {v:.2g} (allowed {allowed[n]:.1g})" for n, v in over.items())
    parting = part(run, oracle, allowed)
    same = None if label == "the original" else oracle
    told += f"; {meaning(parting, run, label, _second(evidence, run, label, limit), same)}"
    line = evidence.line_of(run, Micro if parting.stage in ("gradient", "loss") else Step)
    return rule.failed(f"not what {label} computes: {told}", line, measured=over[name], limit=allowed[name])


def _second(evidence: Evidence, run: Run, label: str, limit: Limits) -> str | None:
    """What the other oracle says of the run: "agrees", "differs", or None where it cannot tell."""
    if label == "the original":  # it alone knows what the conversion has lost
        return None
    if label == "DDP":
        other, role, name = evidence.single, "single", "one process"
    else:
        other, role, name = evidence.reference, "reference", "DDP"
    if other is None or incomparable(run, other, role, name) is not None:
        return None
    measures = compare(run, other).measures
    return "agrees" if limit.agree(measures) else "differs" if limit.differ(measures) else None


def substance(evidence: Evidence, run: Run) -> str:
    """What makes the pass more than luck: the loss fell, gradients and weights moved, the clip was reached, the data differ."""
    losses = [loss for loss in run.losses if loss is not None]
    told = [f"the loss went from {losses[0]:.4g} to {losses[-1]:.4g}"] if len(losses) > 1 else []
    trainable = [name for name, entries in run.parameters.items() if entries[0].trainable]
    steps = range(1, run.steps() + 1)
    fed = {n for s in steps for n, g in run.whole(Step, "grads_at_step", s).items() if g is not None and g[0] > 0.0}
    idle = [name for name in trainable if name not in fed]
    told.append(
        f"{some(idle)} never got a gradient" if idle else f"all {len(trainable)} trainable parameters got gradients"
    )
    moved = {n for s in steps for r in run.at_step(Stepped, s) for n, m in r.moved.items() if m[0] > 0.0}
    still = [name for name in trainable if name not in moved and name not in idle]
    if still:
        told.append(f"{some(still)} did not move")
    if _clips(evidence.provoked) or (evidence.train is not None and clip_was_reached(evidence.train)):
        reached = any(
            (a := run.grad_norm(s)) is not None
            and (b := run.grad_norm(s, "grads_at_step")) is not None
            and b < 0.999 * a
            for s in steps
        )
        told.append("the clip was reached" if reached else "the clip was never reached in these steps")
    if run.world_size > 1 and any(rows := run.rows(1)) and all(r == rows[0] for r in rows):
        told.append("all ranks saw the same samples")
    return ", ".join(told)


def _clips(provoked: Run | None) -> bool:
    """Whether gradients 1e6 times as large were scaled down before the step."""
    record = provoked.traces[0].first(Stress) if provoked is not None and provoked.traces else None
    return record is not None and any(ss < 0.9 * bb for bb, _, ss in record.products.values() if bb > 0.0)
