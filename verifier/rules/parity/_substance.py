"""What a pass against an oracle rests on."""

from collections.abc import Iterator

from ...analysis.scaling import clip_was_reached
from ...trace.events import Step, Stepped, Stress
from ..base import Evidence, Run, some


def substance(evidence: Evidence, run: Run) -> str:
    """What a pass rests on: the loss fell, gradients and weights changed, the clip was reached, the
    data differ.
    """
    losses = [loss for loss in run.losses if loss is not None]
    texts = [f"the loss went from {losses[0]:.4g} to {losses[-1]:.4g}"] if len(losses) > 1 else []
    texts += _of_parameters(run)
    if _clips(evidence.provoked) or (
        evidence.train is not None and clip_was_reached(evidence.train)
    ):
        steps = range(1, run.steps() + 1)
        norms = [(run.grad_norm(s), run.grad_norm(s, "grads_at_step")) for s in steps]
        # A norm that is scaled by less than 0.1 % is rounding, no clip.
        reached = any(a is not None and b is not None and b < 0.999 * a for a, b in norms)
        texts.append(
            "the clip was reached" if reached else "the clip was never reached in these steps"
        )
    if run.world_size > 1 and any(rows := run.rows(1)) and all(r == rows[0] for r in rows):
        texts.append("all ranks saw the same samples")
    return ", ".join(texts)


def _of_parameters(run: Run) -> Iterator[str]:
    """Which trainable parameters got gradients, and which of them did not change."""
    trainable = [name for name, entries in run.parameters.items() if entries[0].trainable]
    fed, moved = set[str](), set[str]()
    for step in range(1, run.steps() + 1):
        gradients = run.whole(Step, "grads_at_step", step)
        fed |= {n for n, g in gradients.items() if g is not None and g[0] > 0.0}
        for record in run.at_step(Stepped, step):
            moved |= {n for n, m in record.moved.items() if m[0] > 0.0}
    idle = [name for name in trainable if name not in fed]
    all_fed = f"all {len(trainable)} trainable parameters got gradients"
    yield f"{some(idle)} never got a gradient" if idle else all_fed
    if still := [name for name in trainable if name in fed and name not in moved]:
        yield f"{some(still)} did not change"


def _clips(provoked: Run | None) -> bool:
    """Whether gradients 1e6 times as large were scaled down before the step."""
    # A clip by norm scales these by far more than 10 %, rounding by far less.
    record = provoked.traces[0].first(Stress) if provoked is not None and provoked.traces else None
    return record is not None and any(
        ss < 0.9 * bb for bb, _, ss in record.products.values() if bb > 0.0
    )
