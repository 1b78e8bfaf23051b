from ...analysis.precision import LOW
from ...source.events import STORE, Event, Flow, covers
from ...source.flow_queries import LOW_DTYPES, cast_of, is_dtype, text
from ...source.values import Value
from ...trace.events import Shard, Step, Stepped
from ..base import Evidence, Finding, Hits, Rule, Run, some


class Bf16MasterWeights(Rule):
    """The optimizer updates float32 master weights.

    Why: `MixedPrecisionPolicy(param_dtype=bfloat16)` casts for compute and keeps the dtype of the
    sharded weights. A model cast to bfloat16 before `fully_shard` has no float32 weights: an update
    below 1/256 of a weight rounds to 0. So does one that is cast to bfloat16 and back, to write a
    file or for an evaluation, each time that this happens.
    Wrong:
        model = Decoder().to(torch.bfloat16)
        shard(model)
    Right:
        model = Decoder()  # float32 master weights
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, mp_policy=policy)
    Fix: Build or load the model in float32 and let `mp_policy` cast; with transformers pass
    `dtype=torch.float32`.
    Source: huggingface/accelerate#3979; meta-pytorch/torchtune#2254; the docstring of
    `MixedPrecisionPolicy`.
    """

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        record = run.at_step(Step, 1)[0]
        held = [name for name in record.held if run.parameters[name][0].trainable]
        if (rounded := _rounded(run, len(held))) is not None:
            text = (
                f"before step {rounded.step} all {len(held)} float32 weights were rounded to a"
                " 16-bit dtype since the last step"
            )
            fix = (
                "Cast a copy (`{name: w.bfloat16() for name, w in state_dict.items()}`), not the"
                " model."
            )
            return self.failed(text, rounded.at_line, fix=fix)
        low = [name for name in held if run.parameters[name][0].dtype in LOW]
        # Where nothing is trainable the script changes weights itself; no optimizer updates them in
        # low precision (zeroth order and evolution scripts).
        if not any(entries[0].trainable for entries in run.parameters.values()):
            return self.not_applicable(
                "no parameter is trainable: the script changes weights itself, without gradients"
            )
        if not held:
            return self._of_copies(run)
        if not low:
            dtypes = sorted({run.parameters[name][0].dtype for name in held})
            return self.passed(f"the optimizer updates weights in {', '.join(dtypes)}")
        which = f"{some(low)} are {run.parameters[low[0]][0].dtype} in the optimizer"
        # An optimizer that is not torch's may keep float32 copies or round stochastically: not
        # known, so inconclusive (library optimizers with float32 copies or stochastic rounding).
        if not record.cls.startswith("torch.optim."):
            cls = record.cls.rpartition(".")[2]
            return self.unknown(
                f"{which}; {cls} may keep float32 copies or round stochastically: not known"
            )
        share = _changed(run, low)
        return self.failed(
            f"{which}; the last step changed {share:.1%} of their elements", run.line_of(Shard)
        )

    def _of_copies(self, run: Run) -> Finding:
        """Of an optimizer that holds no parameter of the model."""
        if run.changed:
            return self.not_applicable(
                "the optimizer updates tensors of its own, which the script writes into the model"
            )
        return self.unknown("the optimizer holds no trainable parameter of a model that was seen")

    def detect(self, flow: Flow) -> Hits:
        if flow.methods("requires_grad_") or any(
            e.method == "requires_grad" for e in flow.ops(STORE)
        ):
            # A script that freezes parameters may hold those in 16 bits (zoo/lora_adapters.py;
            # finetune.base_dtype bfloat16).
            return  # low precision may be intended for frozen parameters
        by_torch = [
            m
            for event, models in flow.optimizers
            if event.op.startswith("torch.optim.")
            for m in models
        ]
        for root in flow.roots.values():
            shard = flow.first_shard.get(id(root))
            casts = [e for e in flow.events if e.on is root and cast_of(e) is not None]
            if shard is None or root not in by_torch or any(cast_of(e) is False for e in casts):
                continue
            if low := [e for e in casts if covers(e, shard)] or _born_low(flow, root, shard):
                yield f"{text(low[0].node)}: the optimizer updates 16-bit weights", low[0]


def _rounded(run: Run, weights: int) -> Step | None:
    """The first step before which so many weights were rounded to 16 bits.

    All float32 weights at once hold values of 16 bits only if a cast rounded the model; a few
    (ones, zeros) may by chance. With no parameter held it says nothing (exam round 3
    g_07_bf16_snapshots (missed)).
    """
    steps = run.traces[0].steps
    return next((one for one in steps if one.rounded and len(one.rounded) == weights), None)


def _changed(run: Run, names: list[str]) -> float:
    """The share of the elements of some parameters that the last step changed."""
    changed = sum(
        record.moved[name][2]
        for record in run.at_step(Stepped, run.steps())
        for name in names
        if name in record.moved
    )
    return changed / max(sum(e.local_numel for name in names for e in run.parameters[name]), 1)


def _born_low(flow: Flow, root: Value, shard: Event) -> list[Event]:
    """The call that made a model in low precision."""
    born: Event | None = root.event
    if born is None or not covers(born, shard):
        return []
    dtype = born.kwargs.get("torch_dtype") or born.kwargs.get("dtype")
    if root.kind == "made" and is_dtype(dtype, LOW_DTYPES):
        return [born]
    defaults = [
        e
        for e in flow.ops("torch.set_default_dtype")
        if e.index < born.index and not e.guards and e.args
    ]
    return [e for e in defaults[-1:] if is_dtype(e.args[0], LOW_DTYPES)]
