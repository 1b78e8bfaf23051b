"""What rules on errors that torch raises share: texts of errors, and which rule and line an error
belongs to.
"""

import re

from ..analysis.applicability import unsharded
from ..analysis.precision import LOW
from ..analysis.root_cause import RootCause, root_cause
from ..trace.events import Place, Raised, RaisedFrame, Shard
from .base import RaisedRule, Run

# One text of torch for five faults: the stack shows which (`culprit`) (faults root_not_wrapped,
# custom_forward_bypass, full_sd_into_dtensor, ddp_around_fsdp).
MIXED = r"got mixed torch\.Tensor and DTensor"
NO_STRATEGY = (
    r"in-place operations that require placement changes are not supported|Sharding propagation"
    r" failed|"
    r"does not have a sharding strategy registered"
)
MESHES = r"must have the same mesh|on inputs with different meshes"
DTYPES = (
    r"expected m1 and m2 to have the same dtype, but got: \S+ != \S+|"
    r"mat1 and mat2 must have the same dtype|Expected query, key, and value to have the same dtype|"
    r"expected scalar type \w+ but found \w+|mixed dtype \(CPU\): expect parameter to have scalar"
    r" type|"
    r"Index put requires the source and destination dtypes match|must have the same scalar type|"
    r"Expected self\.dtype to be equal to src\.dtype"
)


class ShardedRule(RaisedRule):
    """One whose error needs a sharded model, and nothing else: every run of one could have shown
    it.
    """

    def absent(self, train: Run) -> str:
        return unsharded(train)


class MixedRule(ShardedRule):
    """One of the faults for which torch raises MIXED."""

    pattern = MIXED

    def fits(self, run: Run, cause: RootCause) -> bool:
        return culprit(run, cause)[0] == self.name

    def place(self, run: Run, cause: RootCause) -> Place | None:
        return culprit(run, cause)[1] or cause.location


def culprit(run: Run, cause: RootCause) -> tuple[str, Place | None]:
    """(rule, the user's line to change) of an error with the text MIXED."""
    frames = stack(run, cause)
    if "aten.copy_." in cause.error:
        return "full-sd-into-dtensor", cause.location
    if wrapped_in_ddp(run, cause):
        return "ddp-around-fsdp", cause.location
    if any(f.optimizer is not None or "torch/nn/utils/clip_grad" in f.file for f in frames):
        inner = next((f for f in frames if f.optimizer is not None), None)
        if any(
            # Plain trainable parameters beside sharded ones in a clip or an optimizer: the root was
            # not sharded (fault root_not_wrapped*.py).
            e[0].trainable and not e[0].managed and not e[0].sharded
            for e in run.parameters.values()
        ):
            # Kept out with `ignored_params`, they are to be clipped apart (accelerate#4219).
            clips = any("torch/nn/utils/clip_grad" in f.file for f in frames)
            kept_out = any(shard.ignored for shard in run.all(Shard))
            return "clip-mixed-mesh" if clips and kept_out else "root-not-wrapped", cause.location
        # An optimizer outside torch.optim that fails in its first run keeps plain state; in a
        # resume the state came from a full file (fault lowbit_or_unsupported_optimizer.yaml).
        if run.role == "train" and inner is not None and "torch/optim/" not in inner.file:
            return (
                "lowbit-or-unsupported-optimizer",
                cause.location,
            )  # the script's or a library's, with plain state
        return "full-sd-into-dtensor", cause.location
    if (line := _around_forward(frames, cause)) is not None:
        return "custom-forward-bypass", line
    return "weight-used-outside-forward", cause.location


def stack(run: Run, cause: RootCause) -> list[RaisedFrame]:
    """The frames of the error, innermost first, with what their `self` is (see
    probe/events/raised.py).
    """
    record = next((t.first(Raised) for t in run.traces if t.rank == cause.rank), None)
    return record.frames if record is not None else []


def by_norm(run: Run, cause: RootCause) -> bool:
    """Whether an error was raised where norms of many tensors are joined."""
    joined = (
        re.search(r"aten\.(stack|cat|_foreach_norm|linalg_vector_norm)\.", cause.error) is not None
    )
    return joined or any("clip_grad" in f.file for f in stack(run, cause))


def wrapped_in_ddp(run: Run, cause: RootCause) -> bool:
    """Whether the error was raised in DistributedDataParallel."""
    return any("torch/nn/parallel/distributed.py" in f.file for f in stack(run, cause))


def stopped_on_plain_weights(run: Run) -> bool:
    """Whether a run stopped because an optimizer or a clip was given sharded and plain weights
    together.
    """
    if run.completed or re.search(MIXED, (cause := root_cause(run)).error) is None:
        return False
    return culprit(run, cause)[0] == "root-not-wrapped"


def _around_forward(frames: list[RaisedFrame], cause: RootCause) -> Place | None:
    """The user's line that runs a module with sharded weights in another way than by calling its
    FSDP module.
    """
    at = None
    for k, frame in enumerate(frames):
        called = any(
            f.number == frame.number and f.function == "_call_impl" for f in frames[k + 1 :]
        )  # with its hooks
        # A method of an FSDP module that was not called through `__call__` runs without the hooks
        # that gather (faults custom_forward_bypass*.yaml).
        if frame.own and frame.fsdp and frame.shards_below > 0 and not called:
            at = k  # a method, or forward by name; the outermost one is what the script calls
    if at is None:
        parts = (
            k for k, f in enumerate(frames) if not f.fsdp and f.shards and f.function == "forward"
        )
        if (at := next(parts, None)) is None:
            return None
    wanted = next((f for f in frames[at + 1 :] if f.own), frames[at])
    return next(
        (f for f in cause.frames if (f.file, f.line) == (wanted.file, wanted.line)), cause.location
    )


def inner_output(run: Run) -> Shard | None:
    """A call of fully_shard, other than the last one, that casts its output to another dtype than
    it computes in.
    """
    cast = [r for r in run.places(Shard)[:-1] if r.param_dtype in LOW and r.output_dtype]
    return next((r for r in cast if r.output_dtype != r.param_dtype), None)
