"""Rules on errors of dtypes, optimizers, clipping and gradient reduction, which torch tells in its own words."""

from __future__ import annotations

import re

from ..blame import Blame
from ..evidence import Evidence
from ..finding import Finding
from ..trace import Record, Run
from .base import RaisedRule, count, some
from .precision import LOW
from .raised_mixed import MIXED, culprit, stack, wrapped_in_ddp

_DTYPES = (
    r"expected m1 and m2 to have the same dtype, but got: \S+ != \S+|"
    r"mat1 and mat2 must have the same dtype|Expected query, key, and value to have the same dtype|"
    r"expected scalar type \w+ but found \w+|mixed dtype \(CPU\): expect parameter to have scalar type|"
    r"Index put requires the source and destination dtypes match|must have the same scalar type|"
    r"Expected self\.dtype to be equal to src\.dtype"
)


class MixedOrigDtypeInGroup(RaisedRule):
    """All trainable parameters of one FSDP group have one dtype before sharding.

    Why: a group is gathered and reduced as one buffer. Norms or adapters in float32 in a bfloat16 block, or a frozen
    quantised block with trainable parts, do not fit into one.
    Wrong:
        for block in model.blocks:
            block.up.to(torch.bfloat16)
        shard(model)
        model(batch)  # raises AssertionError
    Right:
        shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        model(batch)
    Mend: Leave all parameters in float32 and let `mp_policy` cast, or call `fully_shard` on the odd modules first, so
    that they get groups of their own.
    Source: huggingface/accelerate PR#3985; pytorch#156784; hiyouga/LlamaFactory PR#10157.
    Torch: run on 2.13.0.
    """

    name = "mixed-orig-dtype-in-group"
    family = "precision"
    pattern = r"FSDP expects uniform (original parameter|reduce) dtype"

    def place(self, run: Run, cause: Blame) -> Record | None:
        """The first sharding that takes parameters of several dtypes into one group."""
        for record in run.places("shard"):
            if len({p.get("dtype") for p in record["parameters"]}) > 1:
                line: Record | None = record["at_line"]
                return line
        return cause.location


def _policies(run: Run) -> list[Record]:
    """The calls of fully_shard with a low-precision param_dtype."""
    return [r for r in run.places("shard") if r["param_dtype"] in LOW]


def _inner_output(run: Run) -> Record | None:
    """A call of fully_shard, other than the last one, that casts its output to another dtype than it computes in."""
    cast = [r for r in list(run.places("shard"))[:-1] if r["param_dtype"] in LOW and r.get("output_dtype")]
    return next((r for r in cast if r["output_dtype"] != r["param_dtype"]), None)


class OutputDtypeOnInnerBlocks(RaisedRule):
    """`output_dtype` is set on the root, not on the blocks within it.

    Why: it casts what a module returns. On every block, the next operation of the root gets float32 while its own
    parameters were cast to bfloat16.
    Wrong:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        model.norm = nn.LayerNorm(8)
        forward = model.forward
        model.forward = lambda tokens: model.norm(model.blocks[1](model.blocks[0](model.embedding(tokens))))
        shard(model, mp_policy=policy)
        model(batch)  # raises RuntimeError
    Right:
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
        model(batch)
    Mend: Give the blocks a policy without `output_dtype`, and the root one with it.
    Source: goodfire-ai/spd PR#491.
    Torch: run on 2.13.0.
    """

    name = "output-dtype-on-inner-blocks"
    family = "precision"
    pattern = _DTYPES

    def fits(self, run: Run, cause: Blame) -> bool:
        return _inner_output(run) is not None

    def place(self, run: Run, cause: Blame) -> Record | None:
        """The call on a block."""
        inner = _inner_output(run)
        return inner["at_line"] if inner is not None else cause.location


class BuffersAndOddInputsNotCast(RaisedRule):
    """Under a mixed-precision policy, buffers and tensors that FSDP does not see are cast by the model itself.

    Why: `param_dtype` casts parameters, and the floating tensors among the arguments of a forward. A buffer, a tensor
    that forward makes, or one inside an object of your own stays float32 and meets bfloat16 weights.
    Wrong:
        mix = torch.eye(8)  # a buffer
        forward = model.embedding.forward
        model.embedding.forward = lambda tokens: forward(tokens) @ mix
        shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model(batch)  # raises RuntimeError
    Right:
        mix = torch.eye(8)
        forward = model.embedding.forward
        model.embedding.forward = lambda tokens: (x := forward(tokens)) @ mix.to(x.dtype)
        shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model(batch)
    Mend: Cast the tensor where it is used: `.to(x.dtype)`.
    Source: pytorch#146114; pytorch#153077; pytorch#143900; pytorch#159359; goodfire-ai/spd PR#491. On 2.7.1 also
    tensors in a dataclass are left as they are, and the arguments of a sharded module that a checkpoint recomputes.
    Torch: run on 2.13.0 and 2.7.1.
    """

    name = "buffers-and-odd-inputs-not-cast"
    family = "precision"
    pattern = _DTYPES

    def fits(self, run: Run, cause: Blame) -> bool:
        return bool(_policies(run)) and _inner_output(run) is None and _in_forward(run, cause)

    def judge(self, evidence: Evidence) -> Finding:
        found = super().judge(evidence)
        run = evidence.train
        if found.status != "fail" or run is None or run.completed:
            return found
        seen = [f for t in run.traces if (r := t.first("raised")) for f in r["frames"] if f["own"] and "module" in f]
        if not seen:
            return found
        kinds = {**seen[0]["tensors"], **{f"self.{name}": dtype for name, dtype in seen[0]["buffers"].items()}}
        told = ", ".join(f"{name} is {dtype}" for name, dtype in kinds.items())
        return self.failed(f"{found.evidence}; there {told}" if told else found.evidence, found.location)


def _in_forward(run: Run, cause: Blame) -> bool:
    """Whether the error came up within a module, or cannot be placed."""
    frames = stack(run, cause)
    return not frames or any("module" in f for f in frames)


_NO_STRATEGY = (
    r"in-place operations that require placement changes are not supported|Sharding propagation failed|"
    r"does not have a sharding strategy registered"
)
_MESHES = r"must have the same mesh|on inputs with different meshes"


class UnsupportedOptimizer(RaisedRule):
    """The optimizer's operations are defined on sharded tensors.

    Why: an optimizer that reduces over a parameter (row and column means, norms) makes partial results of DTensors, and
    some in-place operations on them have no meaning. `torch.optim.Adafactor` stops, and so does one that keeps its state
    in plain tensors (that of transformers); 8-bit optimizers with kernels of
    their own read shards as if they were whole.
    Wrong:
        optimizer = torch.optim.Adafactor(model.parameters())
        optimizer.step()  # raises RuntimeError
    Right:
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
    Mend: Use AdamW, SGD or another element-wise optimizer, or a low-bit one that is made for FSDP2 (torchao).
    Source: bitsandbytes-foundation/bitsandbytes#1633; pytorch/ao#4912; axolotl-ai-cloud/axolotl#2744.
    Torch: run on 2.13.0.
    """

    name = "lowbit-or-unsupported-optimizer"
    family = "optimizer"
    pattern = rf"{_NO_STRATEGY}|{MIXED}"

    def fits(self, run: Run, cause: Blame) -> bool:
        if re.search(MIXED, cause.error):
            return culprit(run, cause)[0] == self.name
        return any("optimizer" in f for f in stack(run, cause)) and re.search(_MESHES, cause.error) is None

    def place(self, run: Run, cause: Blame) -> Record | None:
        """Where the optimizer was constructed."""
        lines = [r["at_line"] for r in run.places("optimizer") if r["at_line"]]
        return lines[-1] if lines else cause.location


class OpWithoutShardingStrategy(RaisedRule):
    """On sharded parameters and gradients only operations run that DTensor defines.

    Why: masks, `nonzero`, `numpy()`, in-place operations on partial results and some rare operations have no rule for
    shards.
    Wrong:
        with torch.no_grad():
            large = model.head.weight[model.head.weight > 0]  # raises RuntimeError
    Right:
        with torch.no_grad():
            whole = model.head.weight.full_tensor()
            large = whole[whole > 0]
    Mend: Do it on `.full_tensor()` (on all ranks), or element by element on `.to_local()`.
    Source: the messages of torch 2.13.0 in `torch/distributed/tensor`.
    Torch: run on 2.13.0.
    """

    name = "op-without-sharding-strategy"
    family = "wrapping"
    pattern = rf"{_NO_STRATEGY}|\.(numpy|tolist)\(\) is not supported for tensor subclasses|^AssertionError: $"

    def fits(self, run: Run, cause: Blame) -> bool:
        frames = stack(run, cause)
        if cause.error == "AssertionError: " and not (frames and "torch/distributed/tensor/" in frames[0]["file"]):
            return False  # the text of `plain += sharded.norm()`; else an assertion of the script
        elsewhere = any("optimizer" in f for f in frames) or wrapped_in_ddp(run, cause)
        return not elsewhere and re.search(_MESHES, cause.error) is None


class MissingOptimState(RaisedRule):
    """Every trainable parameter gets gradients, or the resume allows that its optimizer state is missing.

    Why: a parameter that never got a gradient has no optimizer state, so none is in the checkpoint; the template of the
    resume asks for it, because the state-dict functions initialise the state of all trainable parameters.
    Wrong:
        whole = StateDictOptions(full_state_dict=True)
        model.unused = nn.Linear(8, 8)
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model, batch).backward()
        optimizer.step()
        states = get_state_dict(model, optimizer, options=whole)
        optimizer = torch.optim.AdamW(model.parameters())
        set_state_dict(  # raises RuntimeError
            model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=whole
        )
    Right:
        model.unused = nn.Linear(8, 8).requires_grad_(False)
        shard(model)
        optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
        loss_of(model, batch).backward()
        optimizer.step()
        states = get_state_dict(model, optimizer)
    Mend: Freeze the parameter (`requires_grad_(False)`) or remove it; else leave its state out of the template.
    Source: pytorch#192224; pytorch#192202; verl PR#7283; InternLM/xtuner PR#2018.
    Torch: run on 2.13.0.
    """

    name = "missing-optim-state-for-unused-param"
    family = "checkpoint"
    simulated = False
    needs = frozenset({"train", "resume"})
    pattern = (
        r"Missing key in checkpoint state_dict: \S*state\.(?P<key>\S+?)\.(step|exp_avg|exp_avg_sq|momentum_buffer)\b|"
        r"Missing optimizer state for parameter '(?P<name>[^']+)'|"
        r"float\(\) argument must be a string or a real number, not 'dict'"
    )

    def judge(self, evidence: Evidence) -> Finding:
        found = super().judge(evidence)
        unused = _never_used(evidence.train)
        if not unused or found.status == "inconclusive":
            return found
        told = f"{count(len(unused), 'trainable parameter')} never got a gradient: {some(unused)}"
        if found.status == "fail":
            return self.failed(f"{found.evidence}; {told}", found.location)
        return self.passed(f"{found.evidence}, but {told}; a resume that wants their optimizer state would fail")

    def fits(self, run: Run, cause: Blame) -> bool:
        return "float() argument" not in cause.error or any("state_dict" in f["file"] for f in stack(run, cause))


def _never_used(run: Run | None) -> list[str]:
    """Trainable parameters without a gradient at any step, on any rank, of a run that made steps."""
    if run is None or run.steps() == 0:
        return []
    used = {n for t in run.traces for r in t.of("step") for n, g in r["grads_at_step"].items() if g is not None}
    held = {n for t in run.traces for r in t.of("step") for n in r["held"]}
    return [n for n, e in run.parameters.items() if e[0]["trainable"] and n in held and n not in used]


RULES = (
    MixedOrigDtypeInGroup,
    OutputDtypeOnInnerBlocks,
    BuffersAndOddInputsNotCast,
    UnsupportedOptimizer,
    OpWithoutShardingStrategy,
    MissingOptimState,
)
