import ast

from ...analysis.follow_up_runs import changes_gradients, clip_is_open
from ...analysis.scaling import (
    limit_between_ranks,
    reduced_by_the_script,
    scales,
    stressed_scales,
    uneven,
)
from ...source.flow_queries import LOCAL, gradient, shared, text
from ...source.lines import find_local_norm, may_clip
from ...source.values import Value, reach
from ...tolerances import ABOUT_ONE_CLIP
from ...trace.events import ClipOfNothing, Clips, Step, Stress
from ..base import Event, Evidence, Finding, Flow, Hits, Rule, count, some


class ManualLocalNormClip(Rule):
    """Gradient clipping scales every shard of a gradient by the same factor.

    Why: a norm over `to_local()` shards is the norm of one rank's part. Each rank then scales by
    its own factor, and the clipped gradient has another direction. The loss still falls, and
    nothing shows until the clip is reached.
    Wrong:
        norm = torch.sqrt(sum(p.grad.to_local().norm() ** 2 for p in model.parameters()))
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            p.grad.mul_(scale)
    Right:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    Fix: Use `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`, whose norm of DTensors
    is over all ranks.
    Source: NVIDIA-NeMo/RL PR#3788; areal-project/AReaL PR#335. A separate run makes the gradients
    1e6 times as large.
    """

    needs = frozenset({"train", "provoked"})

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        scales, whole = _scales(evidence)
        if run.places(ClipOfNothing) or _clipped(scales):
            return ""
        if whole:
            return "the script does not clip by norm, not even gradients 1e6 times as large"
        steps = run.places(Step)
        seen = any(
            step.cls and grad is not None for step in steps for grad in step.grads.values()
        )  # after a backward
        # Without an optimizer of torch there is no gradient 'at the step' to compare: updates are
        # compared with one process instead (exam round 10: own optimizers).
        if steps and not any(step.cls for step in steps):
            return (
                "the script updates its weights without an optimizer of torch: its updates are"
                " compared with one process"
            )
        # Hooks that step within the backward leave no gradient after it; the rule was
        # inconclusive. The sources decide: without a norm of local shards there is no local clip
        # (exam round 8 gc_13_backward_fused_diffusion, ge_14_step_in_backward).
        if not seen and find_local_norm(evidence.sources) is None:
            return (
                "the script updates its weights within the backward, and takes no norm of local"
                " shards"
            )
        touched = evidence.gradients or changes_gradients(run)
        return "" if touched else "the script changes no gradient between backward and the step"

    def unseen(self, evidence: Evidence) -> str:
        return (
            "not checked with one rank: give --nproc 2" if evidence.trained.world_size == 1 else ""
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        if empty := run.places(ClipOfNothing):
            return self._of_nothing(empty[0])
        scales, whole = _scales(evidence)
        # Neither seen to clip nor any clip or norm of gradients in the sources: not applicable
        # rather than inconclusive (exam round 3 g_16_optimizer_in_backward, i_17_optim_in_backward:
        # right, inconclusive).
        if not _clipped(scales) and not whole and not may_clip(evidence.sources):
            none = (
                "the script was not seen to clip, and its sources have no clip and no norm of"
                " gradients"
            )
            return self.not_applicable(none)
        # Whether a clip exists is only shown by gradients made 1e6 times as large; if that run did
        # not reach its step, nothing is known (exam rounds 9 hc_11, 10 ke_16 (a clip that huge
        # gradients did not reach)).
        if not whole and clip_is_open(evidence) and not _clipped(scales):
            lacks = "no run with gradients 1e6 times as large reached its optimizer step"
            return self.unknown(evidence.missing.get("provoked", lacks))
        if not scales:
            return self.unknown("no gradient was seen both after backward and at the step")
        limit = limit_between_ranks(scales)
        # The factors of one clip are equal on all ranks but for float32 rounding (1e-5); a local
        # norm of random shards differs by far more, but may differ by less than 1e-3.
        apart = {name: s for name, s in scales.items() if uneven(s, limit)}
        if apart:
            how_many = f"as in {len(apart)} of {count(len(scales), 'parameter')}"
            huge = "; gradients were made 1e6 times as large to reach the clip" if whole else ""
            return self._uneven(evidence, apart, limit, how_many + huge)
        if not (clipped := _clipped(scales)):
            lacks = "no clip was reached in the train run, and no run with huge gradients was made"
            return self.unknown(evidence.missing.get("provoked", lacks))
        how = "the clip was reached and"
        if whole:
            how = "with gradients made 1e6 times as large the clip"
        return self.passed(f"{how} scaled every shard of {some(clipped, 1)} by one factor")

    def _of_nothing(self, empty: ClipOfNothing) -> Finding:
        """A clip is given a generator that is exhausted."""
        what = f"clip_grad_norm_ is given no parameter in step {empty.step}"
        fix = "Pass a list, or call model.parameters() again for each clip."
        return self.failed(f"{what}: the generator is exhausted", empty.at_line, fix=fix)

    def _uneven(
        self, evidence: Evidence, apart: dict[str, list[float]], limit: float, how_many: str
    ) -> Finding:
        """The ranks scale parts of one parameter by different factors."""
        ratios = {name: max(values) / max(min(values), 1e-300) for name, values in apart.items()}
        name = max(ratios, key=lambda name: ratios[name])
        factors = some(f"{v:.4g}" for v in apart[name])
        text = (
            f"the ranks scale their shards of {name} by different factors: {factors} (allowed:"
            f" {limit:.2g} relative), {how_many}"
        )
        run = evidence.trained
        line = find_local_norm(evidence.sources) or run.line_of(Clips) or run.line_of(Step)
        return self.failed(text, line, measured=ratios[name] - 1.0, limit=limit)

    def detect(self, flow: Flow) -> Hits:
        """Gradients scaled by a factor computed from local shards without a collective."""
        found: dict[ast.AST, tuple[str, Event]] = {}
        for event in flow.events:
            # Only what scales a gradient is a clip; adding decay or noise is not (pairs.yaml
            # manual-local-norm-clip).
            augmented = event.op == "(augmented)" and event.method in ("Mult", "Div")
            scales = event.method in ("mul_", "div_", "copy_") or augmented
            if (
                not scales
                or event.on is None
                or not event.args
                or not gradient(flow, event.on, event)
            ):
                continue
            factor = event.args[0]
            for part in reach(factor):
                taken = part.name in LOCAL and gradient(flow, part, event)
                if taken and any(_is_norm(one) for one in reach(factor)) and not shared(factor):
                    node = part.node if part.node is not None else event.node
                    what = (
                        f"{text(event.node)} scales by a norm of this rank's shards ({text(node)})"
                    )
                    found.setdefault(node, (what, part.event or event))
                    break
        yield from found.values()


def _is_norm(part: Value) -> bool:
    """Whether it is a norm, or a part of one, not of rows alone (a dim from 1 on): these lie on one
    rank each.
    """
    name, event = part.name.rpartition(".")[2], part.event
    if name not in ("norm", "vector_norm", "square", "pow", "Pow"):
        return False
    dim = event.kwargs.get("dim") if event is not None and "norm" in name else None
    # fully_shard cuts dim 0: a norm over later dims (AGC, row norms) lies on one rank whole. A
    # negative dim may be the rows (linted right scripts of the exam: norms over rows).
    return not (dim is not None and isinstance(dim.const, int) and dim.const > 0)


def _scales(evidence: Evidence) -> tuple[dict[str, list[float]], bool]:
    """({parameter: its factor on each rank}, whether they are those of huge gradients, in a run
    that completed).
    """
    run = evidence.provoked
    found = [t.first(Stress) for t in run.traces] if run is not None else []
    records = [record for record in found if record is not None]
    if run is None or not records or len(records) < len(found):
        return scales(evidence.trained), False
    by_script = reduced_by_the_script(evidence.trained)
    return {
        # Plain parameters beside sharded ones (a temperature) are reduced by the script after
        # backward: their factor between backward and step is that, not a clip (exam round 1
        # b_10_clip_logit_scale twin, c_16_replicated_small_params).
        name: s
        for name, s in stressed_scales(records).items()
        if name not in by_script
    }, run.completed


def _clipped(scales: dict[str, list[float]]) -> list[str]:
    """The parameters whose gradients were scaled down, or unevenly."""
    return [
        # Scaled by less than 0.1 % is not scaled: ABOUT_ONE_CLIP is far above rounding of a factor,
        # and far below what a reached clip does.
        name
        for name, factors in scales.items()
        if uneven(factors) or max(factors) < 1.0 - ABOUT_ONE_CLIP
    ]
