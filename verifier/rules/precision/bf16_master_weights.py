from collections.abc import Iterator

from ...analysis.precision import LOW
from ...analysis.wording import some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Event, Flow, covers
from ...source.looks import LOW_DTYPES, is_dtype, text
from ...source.looks_precision import cast_of
from ...source.registry import detector
from ...source.values import Value
from ...trace.events import Shard, Step, Stepped
from ..base import Rule


class Bf16MasterWeights(Rule):
    """The weights that the optimizer updates are float32.

    Why: `MixedPrecisionPolicy(param_dtype=bfloat16)` casts for compute and keeps the sharded weights as they were. A
    model that was cast to bfloat16 before `fully_shard` has no float32 weights at all: an update smaller than 1/256
    of a weight rounds to nothing.
    Wrong:
        model = Decoder().to(torch.bfloat16)
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    Right:
        model = Decoder()  # float32 master weights
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    Fix: Build or load the model in float32 and let `mp_policy` cast; with transformers pass `dtype=torch.float32`.
    Source: huggingface/accelerate#3979; meta-pytorch/torchtune#2254; the docstring of `MixedPrecisionPolicy`.
    """

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        record = run.at_step(Step, 1)[0]
        held = [name for name in record.held if run.parameters[name][0].trainable]
        low = [name for name in held if run.parameters[name][0].dtype in LOW]
        if not held:
            return self.unknown("the optimizer holds no trainable parameter of a model that was seen")
        if not low:
            dtypes = sorted({run.parameters[name][0].dtype for name in held})
            return self.passed(f"the optimizer updates weights in {', '.join(dtypes)}")
        if not record.cls.startswith("torch.optim."):
            return self.unknown(
                f"{some(low)} are {run.parameters[low[0]][0].dtype}, and {record.cls.rpartition('.')[2]} is not torch's: whether "
                "it keeps float32 weights of its own, or rounds at random, is not known"
            )
        changed = sum(r.moved[n][2] for r in run.at_step(Stepped, run.steps()) for n in low if n in r.moved)
        present = sum(e.local_numel for n in low for e in run.parameters[n])
        return self.failed(
            f"{some(low)} are {run.parameters[low[0]][0].dtype} in the optimizer; the last step changed "
            f"{changed / max(present, 1):.1%} of their elements",
            evidence.line_of(run, Shard),
        )


def _trained_by_torch(flow: Flow, model: Value) -> bool:
    return any(model in models and event.op.startswith("torch.optim.") for event, models in flow.optimizers)


@detector("bf16-master-weights")
def low_master_weights(flow: Flow) -> Iterator[Hit]:
    for root in flow.roots.values():
        shard = flow.first_shard.get(id(root))
        if shard is None or not _trained_by_torch(flow, root):
            continue
        casts = [e for e in flow.events if e.on is root and cast_of(e) is not None]
        if any(cast_of(e) is False for e in casts) or _is_frozen(flow):
            continue
        low = [e for e in casts if covers(e, shard)] or _born_low(flow, root, shard)
        if low:
            told = f"{text(low[0].node)}: the weights that the optimizer keeps are 16 bits wide"
            yield flow.hit("bf16-master-weights", told, low[0])


def _is_frozen(flow: Flow) -> bool:
    """Whether some parameters do not train: then low precision may be meant for those."""
    partly = any(e.method == "requires_grad" for e in flow.by_op.get("(store)", ()))
    return partly or bool(flow.methods("requires_grad_"))


def _born_low(flow: Flow, root: Value, shard: Event) -> list[Event]:
    """The call that made a model in low precision."""
    born: Event | None = root.event
    if born is None or not covers(born, shard):
        return []
    dtype = born.kwargs.get("torch_dtype") or born.kwargs.get("dtype")
    if root.kind == "made" and is_dtype(dtype, LOW_DTYPES) and dtype is not None:
        return [born]
    found: list[Event] = []
    for event in flow.ops("torch.set_default_dtype"):
        if event.index < born.index and not event.guards and event.args:
            found = [event] if is_dtype(event.args[0], LOW_DTYPES) else []
    return found
