"""Rules on gradient clipping."""

from __future__ import annotations

from ..analysis.first_run import clip_is_open
from ..analysis.scaling import SAME, stressed_scales, uneven
from ..analysis.scaling import scales as scales_of
from ..evidence import Evidence
from ..finding import Finding
from ..static import find_local_norm
from ..trace import Record, Run
from .base import Rule, count, some


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
    Mend: Use `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`; on DTensor gradients its norm is over
    all ranks.
    Source: NVIDIA-NeMo/RL PR#3788; areal-project/AReaL PR#335. In a run of its own (provoked) the probe makes
    the gradients 1e6 times as large, so that a clip which exists comes into force.
    Torch: run on 2.13.0.
    """

    name = "manual-local-norm-clip"
    family = "clipping"
    needs = frozenset({"train", "provoked"})

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        if run.world_size == 1:
            return self.unknown("one rank has one factor")
        if (empty := next(run.places("clip_of_nothing"), None)) is not None:
            return self.failed(
                f"clip_grad_norm_ is given no parameter in step {empty['step']}: a generator was used up before",
                empty["at_line"],
                fix="Give it a list, or call model.parameters() anew each time.",
            )
        stressed = _stressed(evidence)
        scales = stressed_scales(stressed) if stressed else scales_of(run)
        visible = any(uneven(s) or max(s) < 1.0 - SAME for s in scales.values())
        if not stressed and clip_is_open(evidence) and not visible:
            return self.unknown("no run with gradients 1e6 times as large came to its step")
        if not scales and stressed:
            return self.passed("what is done to gradients between backward and the step is no scaling by a norm")
        if not scales:
            return self.unknown("no gradient was seen both after backward and at the step")
        apart = {name: s for name, s in scales.items() if uneven(s)}
        if apart:
            name, values = max(apart.items(), key=lambda item: max(item[1]) / max(min(item[1]), 1e-300))
            shown = ", ".join(f"{v:.4g}" for v in values)
            return self.failed(
                f"the shards of {name} are scaled by {shown} on the ranks ({len(apart)} of {len(scales)} parameters are scaled unevenly)",
                _line(evidence, run),
                measured=max(values) / max(min(values), 1e-300) - 1.0,
                limit=SAME,
            )
        clipped = [name for name, s in scales.items() if max(s) < 1.0 - SAME]
        if not clipped:
            what = "not even gradients 1e6 times as large" if stressed else "in the steps that it made"
            return self.passed(f"the script does not clip by norm, {what}")
        return self.passed(f"clipping was in force and scaled every shard of {some(clipped, 1)} by one factor")


def _stressed(evidence: Evidence) -> list[Record]:
    """For each rank what it made of huge gradients; [] unless all ranks came to that."""
    run = evidence.provoked
    found = [t.first("stress") for t in run.traces] if run is not None else []
    return [record for record in found if record is not None] if all(found) else []


def _line(evidence: Evidence, run: Run) -> dict[str, object] | None:
    """The line that takes a local norm, if the sources show one; else the optimizer step before which it happens."""
    return find_local_norm(evidence.sources) or evidence.line_of(run, "step")


class GradNormItemPartial(Rule):
    """A number that is read from a DTensor is the number of the whole tensor.

    Why: `p.grad.norm()`, `p.sum()` and the like give a DTensor that is still to be reduced (`Partial`). `.item()` and
    `float()` read what this rank has: a norm that is too small by about the square root of the world size, and another
    one on every rank. Logs are wrong, and a threshold on it is taken differently by the ranks.
    Wrong:
        norms = [p.grad.norm().item() for p in model.parameters()]
        total = sum(norm**2 for norm in norms) ** 0.5
    Right:
        norms = [p.grad.norm().full_tensor().item() for p in model.parameters()]
        total = sum(norm**2 for norm in norms) ** 0.5
    Mend: Call `.full_tensor()` (on all ranks) before `.item()` or `float()`; for the norm of all gradients use the
    result of `torch.nn.utils.clip_grad_norm_` or `torch.nn.utils.get_total_norm`.
    Source: radixark/miles_diffusion PR#35; pytorch#170862; baidu-baige/LoongForge PR#152; hiyouga/LlamaFactory
    PR#10366. On 2.7.1 also the result of `clip_grad_norm_` is `Partial`; on 2.13.0 it is not.
    Torch: run on 2.13.0 and 2.7.1.
    """

    name = "grad-norm-item-partial"
    family = "clipping"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.train
        if run is None or run.steps() == 0:
            return self.unknown("no optimizer step was seen")
        reads = [r for t in run.traces for r in t.of("partial_read")]
        if not reads:
            return self.passed("no number was read from a DTensor that is still to be reduced")
        first = reads[0]
        places = {(r["at_line"]["file"], r["at_line"]["line"]) for r in reads}
        return self.failed(
            f"`{_CALLS.get(first['op'], first['op'])}` reads the local value of a DTensor with placements "
            f"({', '.join(first['placements'])}): each of the {run.world_size} ranks has its own part ({count(len(places), 'such line')})",
            first["at_line"],
        )


_CALLS = {"item": ".item()", "tolist": ".tolist()", "numpy": ".numpy()", "__float__": "float()", "__int__": "int()"} | {
    "__bool__": "bool()",
    "__array__": "numpy.asarray()",
    "__complex__": "complex()",
}

RULES = (ManualLocalNormClip, GradNormItemPartial)
