from collections.abc import Iterator

from ...analysis.first_run import changes_gradients, clip_is_open
from ...analysis.scaling import SAME, stressed_scales, uneven
from ...analysis.scaling import scales as scales_of
from ...analysis.wording import some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.lines import find_local_norm
from ...source.looks import shared, text
from ...source.looks_clipping import LOCAL, gradient, names
from ...source.registry import detector
from ...source.values import reach
from ...trace import Run
from ...trace.events import ClipOfNothing, Place, Step, Stress
from ..base import Rule


class ManualLocalNormClip(Rule):
    """Clipping by norm scales every shard of a gradient by the same factor.

    Why: a norm taken over `to_local()` shards is the norm of one rank's part. Each rank then scales by a factor of
    its own, and the clipped gradient points elsewhere. The loss falls all the same, and while the threshold is not
    reached nothing shows at all.
    Wrong:
        norm = torch.sqrt(sum(p.grad.to_local().norm() ** 2 for p in model.parameters()))
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(scale)
    Right:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    Fix: Use `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`; on DTensor gradients its norm is over
    all ranks.
    Source: NVIDIA-NeMo/RL PR#3788; areal-project/AReaL PR#335. In a run of its own (provoked) the probe makes
    the gradients 1e6 times as large, so that a clip which exists comes into force.
    """

    needs = frozenset({"train", "provoked"})

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        if next(run.places(ClipOfNothing), None) is not None:
            return ""
        stressed = _stressed(evidence)
        scales = stressed_scales(stressed) if stressed else scales_of(run)
        quiet = not any(uneven(s) or max(s) < 1.0 - SAME for s in scales.values())
        if stressed and quiet and evidence.provoked is not None and evidence.provoked.completed:
            return "the script does not clip by norm, not even gradients 1e6 times as large"
        touched = evidence.gradients or changes_gradients(run)
        return "the script changes no gradient between backward and the step" if quiet and not touched else ""

    def unseen(self, evidence: Evidence) -> str:
        return "one rank has one factor: give --nproc 2" if evidence.trained.world_size == 1 else ""

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        if (empty := next(run.places(ClipOfNothing), None)) is not None:
            return self.failed(
                f"clip_grad_norm_ is given no parameter in step {empty.step}: a generator was used up before",
                empty.at_line,
                fix="Give it a list, or call model.parameters() anew each time.",
            )
        stressed = _stressed(evidence)
        scales = stressed_scales(stressed) if stressed else scales_of(run)
        visible = any(uneven(s) or max(s) < 1.0 - SAME for s in scales.values())
        whole = bool(stressed) and evidence.provoked is not None and evidence.provoked.completed
        if not whole and clip_is_open(evidence) and not visible:
            return self.unknown("no run with gradients 1e6 times as large came to its step")
        if not scales:
            return self.unknown("no gradient was seen both after backward and at the step")
        apart = {name: s for name, s in scales.items() if uneven(s)}
        if apart:
            name, values = max(apart.items(), key=lambda item: max(item[1]) / max(min(item[1]), 1e-300))
            factors = ", ".join(f"{v:.4g}" for v in values)
            return self.failed(
                f"the shards of {name} are scaled by {factors} on the ranks ({len(apart)} of {len(scales)} parameters are scaled unevenly)",
                _line(evidence, run),
                measured=max(values) / max(min(values), 1e-300) - 1.0,
                limit=SAME,
            )
        clipped = [name for name, s in scales.items() if max(s) < 1.0 - SAME]
        if not clipped:
            return self.unknown(
                "no clip was in force in the steps of the train run, and no run with huge gradients was made"
            )
        return self.passed(f"clipping was in force and scaled every shard of {some(clipped, 1)} by one factor")


def _stressed(evidence: Evidence) -> list[Stress]:
    """For each rank what it made of huge gradients; [] unless all ranks came to that."""
    run = evidence.provoked
    found = [t.first(Stress) for t in run.traces] if run is not None else []
    return [record for record in found if record is not None] if all(found) else []


def _line(evidence: Evidence, run: Run) -> Place | None:
    """The line that takes a local norm, if the sources show one; else the optimizer step before which it happens."""
    return find_local_norm(evidence.sources) or evidence.line_of(run, Step)


_SCALES = ("mul_", "div_", "copy_")


@detector("manual-local-norm-clip")
def manual_local_norm_clip(flow: Flow) -> Iterator[Hit]:
    """Gradients scaled by a factor that comes from local shards and met no collective."""
    seen: set[int] = set()
    for event in flow.events:
        scales = event.method in _SCALES or (event.op == "(augmented)" and event.method in ("Mult", "Div"))
        if not scales or event.on is None or not event.args or not gradient(flow, event.on, event):
            continue
        factor = event.args[0]
        for part in reach(factor):
            taken = part.name in LOCAL and gradient(flow, part, event)
            if taken and names(factor) & {"norm", "vector_norm", "square", "pow", "Pow"} and not shared(factor):
                node = part.node if part.node is not None else event.node
                if id(node) not in seen:
                    seen.add(id(node))
                    told = f"{text(event.node)} scales by a norm of this rank's shards ({text(node)})"
                    yield flow.hit("manual-local-norm-clip", told, part.event or event)
                break
