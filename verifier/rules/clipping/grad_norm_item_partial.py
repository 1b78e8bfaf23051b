from collections.abc import Iterator

from ...analysis.wording import count
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Event, Flow
from ...source.looks import shared, text
from ...source.looks_clipping import LOCAL, gradient, names
from ...source.registry import detector
from ...source.values import Value, reach
from ...trace import Run
from ...trace.events import PartialRead
from ..base import Rule


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
    Fix: Call `.full_tensor()` (on all ranks) before `.item()` or `float()`; for the norm of all gradients use the
    result of `torch.nn.utils.clip_grad_norm_` or `torch.nn.utils.get_total_norm`.
    Source: radixark/miles_diffusion PR#35; pytorch#170862; baidu-baige/LoongForge PR#152; hiyouga/LlamaFactory
    PR#10366. On 2.7.1 also the result of `clip_grad_norm_` is `Partial`; on 2.13.0 it is not.
    Torch: run on 2.13.0 and 2.7.1.
    """

    def applies(self, evidence: Evidence) -> str:
        sharded = any(e.sharded for entries in evidence.trained.parameters.values() for e in entries)
        return "" if sharded or _reads(evidence.trained) else "no parameter is a DTensor"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        reads = _reads(run)
        if not reads:
            return self.passed("no number was read from a DTensor that is still to be reduced")
        first = reads[0]
        places = {(r.at_line.file, r.at_line.line) for r in reads if r.at_line is not None}
        return self.failed(
            f"`{_CALLS.get(first.op, first.op)}` reads the local value of a DTensor with placements "
            f"({', '.join(first.placements)}): each of the {run.world_size} ranks has its own part ({count(len(places), 'such line')})",
            first.at_line,
        )


def _reads(run: Run) -> list[PartialRead]:
    return [record for trace in run.traces for record in trace.of(PartialRead)]


_CALLS = {"item": ".item()", "tolist": ".tolist()", "numpy": ".numpy()", "__float__": "float()", "__int__": "int()"} | {
    "__bool__": "bool()",
    "__array__": "numpy.asarray()",
    "__complex__": "complex()",
}


_NORMS = ("norm", "sum", "square", "pow", "vector_norm", "abs", "max", "mean", "Pow")


@detector("grad-norm-item-partial")
def grad_norm_item_partial(flow: Flow) -> Iterator[Hit]:
    """`.item()` or `float()` straight on a norm of one parameter's gradient."""
    reduced = [part for e in flow.matching(lambda n: n.startswith("dist.")) for a in e.given() for part in reach(a)]
    items: list[tuple[Event, Value]] = [(e, e.on) for e in flow.methods("item") if e.on is not None]
    items += [(e, e.args[0]) for e in flow.ops("builtins.float") if e.args]
    for event, value in items:
        if event.forked or not _plain_chain(value) or not gradient(flow, value, event) or shared(value):
            continue
        if names(value) & set(LOCAL) or event.result in reduced or flow.partial:
            continue
        yield flow.hit(
            "grad-norm-item-partial", f"{text(event.node)} reads the part of the norm that this rank holds", event
        )


def _plain_chain(value: Value) -> bool:
    """Whether a value is a norm of `something.grad`, by methods alone."""
    current, normed = value, False
    for _ in range(6):
        if current.kind == "attr" and current.name == "grad":
            return normed
        if current.kind not in ("made", "derived") or current.name.rpartition(".")[2] not in (
            *_NORMS,
            "detach",
            "float",
        ):
            return False
        normed = normed or current.name.rpartition(".")[2] in ("norm", "sum", "vector_norm", "max", "mean")
        if not current.parts:
            return False
        current = current.parts[0]
    return False
