from ...source.flow_queries import LOCAL, gradient, names, shared, text
from ...source.values import Value, reach
from ...trace.events import PartialRead
from ..base import Event, Evidence, Finding, Flow, Hits, Rule, Run, count


class GradNormItemPartial(Rule):
    """A scalar read from a Partial DTensor is one rank's part.

    Why: `p.grad.norm()`, `p.sum()` and the like give a DTensor that is not reduced yet (`Partial`).
    `.item()` and `float()` read the local part: a norm too small by about the square root of the
    world size, and different on every rank. Logs are wrong, and the ranks decide differently at a
    threshold.
    Wrong:
        norms = [p.grad.norm().item() for p in model.parameters()]
    Right:
        norms = [p.grad.norm().full_tensor().item() for p in model.parameters()]
    Fix: Call `.full_tensor()` (on all ranks) before `.item()` or `float()`; for the norm of all
    gradients use the result of `torch.nn.utils.clip_grad_norm_` or `torch.nn.utils.get_total_norm`.
    Source: radixark/miles_diffusion PR#35; pytorch#170862; baidu-baige/LoongForge PR#152;
    hiyouga/LlamaFactory PR#10366. On 2.7.1 also the result of `clip_grad_norm_` is `Partial`; on
    2.13.0 it is not.
    Torch: run on 2.13.0 and 2.7.1.
    """

    def applies(self, evidence: Evidence) -> str:
        sharded = any(
            e.sharded for entries in evidence.trained.parameters.values() for e in entries
        )
        return "" if sharded or evidence.trained.all(PartialRead) else "no parameter is a DTensor"

    def judge(self, evidence: Evidence) -> Finding:
        reads = _rank_local(evidence.trained)
        if not reads:
            return self.passed(
                "no scalar was read from a Partial DTensor, or it was the same condition on all"
                " ranks"
            )
        first, ranks = reads[0], evidence.trained.world_size
        lines = count(
            len({(r.at_line.file, r.at_line.line) for r in reads if r.at_line is not None}),
            "such line",
        )
        read = (
            f"`{_CALLS.get(first.op, first.op)}` reads the local part of a DTensor"
            f" ({', '.join(first.placements)})"
        )
        return self.failed(
            f"{read}: another value on each of the {ranks} ranks ({lines})", first.at_line
        )

    def detect(self, flow: Flow) -> Hits:
        """`.item()` or `float()` straight on a norm of one parameter's gradient."""
        items: list[tuple[Event, Value]] = [
            (e, e.on) for e in flow.methods("item") if e.on is not None
        ]
        items += [(e, e.args[0]) for e in flow.ops("builtins.float") if e.args]
        collectives = flow.matching(lambda n: n.startswith("dist.")) if items else []
        reduced = [part for e in collectives for a in e.given() for part in reach(a)]
        for event, value in items:
            # A number of this rank's part that goes into a collective afterwards is right
            # (zoo/shard_norm_clip.py, zoo/manual_global_clip.py).
            joined = shared(value) or names(value) & set(LOCAL) or event.result in reduced
            if (
                not (event.forked or flow.partial or joined)
                and _plain_chain(value)
                and gradient(flow, value, event)
            ):
                yield f"{text(event.node)} reads one rank's part of the norm", event


def _rank_local(run: Run) -> list[PartialRead]:
    """The reads, without conditions that came out alike on all ranks: with `any()` false
    everywhere, so is the whole.
    """
    truths: dict[tuple[str, int], set[frozenset[bool | None]]] = {}
    for trace in run.traces:
        own: dict[tuple[str, int], set[bool | None]] = {}
        for record in trace.of(PartialRead):
            own.setdefault(_place(record), set()).add(record.truth)
        for place, seen in own.items():
            truths.setdefault(place, set()).add(frozenset(seen))
    reads = run.all(PartialRead)
    # A condition on partial values (`isnan().any()`) that came out alike on all ranks led nowhere
    # wrong: false everywhere means false for the whole.
    return [r for r in reads if r.truth is None or len(truths[_place(r)]) > 1]


def _place(record: PartialRead) -> tuple[str, int]:
    return (record.at_line.file, record.at_line.line) if record.at_line is not None else ("", 0)


_CALLS = {name: f".{name}()" for name in ("item", "tolist", "numpy")}
_CALLS |= {f"__{name}__": f"{name}()" for name in ("float", "int", "bool", "complex")}
_CALLS |= {"__array__": "numpy.asarray()"}
_NORMS = ("norm", "sum", "vector_norm", "max", "mean")
# Methods that keep a norm of one gradient a norm; anything else (full_tensor, a collective) may
# make it whole, and is not reported (pairs.yaml grad-norm-item-partial).
_CHAIN = (*_NORMS, "square", "pow", "abs", "Pow", "detach", "float")


def _plain_chain(value: Value) -> bool:
    """Whether a value is a norm of `something.grad`, by methods alone."""
    current, normed = value, False
    # Bound of the walk through chained methods; real chains have two or three.
    for _ in range(6):  # so many methods at most
        if current.kind == "attr" and current.name == "grad":
            return normed
        name = current.name.rpartition(".")[2]
        if current.kind not in ("made", "derived") or name not in _CHAIN or not current.parts:
            return False
        normed, current = normed or name in _NORMS, current.parts[0]
    return False
