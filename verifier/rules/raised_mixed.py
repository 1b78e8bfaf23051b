"""Rules on torch's `got mixed torch.Tensor and DTensor`: one text, several faults. The stack of the error tells them apart."""

from __future__ import annotations

from ..blame import Blame, blame
from ..trace import Record, Run
from .base import RaisedRule

MIXED = r"got mixed torch\.Tensor and DTensor"
_CLIP = "torch/nn/utils/clip_grad"
_WRAPPER = "torch/nn/parallel/distributed.py"


def culprit(run: Run, cause: Blame) -> tuple[str, Record | None]:
    """(rule, the user's line to be changed) of an error with the text MIXED."""
    frames = stack(run, cause)
    if "aten.copy_." in cause.error:
        return "full-sd-into-dtensor", cause.location
    if wrapped_in_ddp(run, cause):
        return "ddp-around-fsdp", cause.location
    if any("optimizer" in f or _CLIP in f["file"] for f in frames):
        inner = next((f for f in frames if "optimizer" in f), None)
        plain = any(e[0]["trainable"] and not e[0]["managed"] and not e[0]["sharded"] for e in run.parameters.values())
        if not plain and run.role == "train" and inner is not None and "torch/optim/" not in inner["file"]:
            return (
                "lowbit-or-unsupported-optimizer",
                cause.location,
            )  # one of the script's or of a library, with plain state
        return ("root-not-wrapped" if plain else "full-sd-into-dtensor"), cause.location
    if (line := _around_forward(frames, cause)) is not None:
        return "custom-forward-bypass", line
    return "weight-used-outside-forward", cause.location


def wrapped_in_ddp(run: Run, cause: Blame) -> bool:
    """Whether the error came up in DistributedDataParallel."""
    return any(_WRAPPER in f["file"] for f in stack(run, cause))


def stack(run: Run, cause: Blame) -> list[Record]:
    """The frames of the error, innermost first, with what their `self` is (see probe/events/raised.py)."""
    record = next((t.first("raised") for t in run.traces if t.rank == cause.rank), None)
    return record["frames"] if record is not None else []


def stopped_on_plain_weights(run: Run) -> bool:
    """Whether a run stopped because an optimizer or a clip met sharded and plain weights together."""
    if run.completed:
        return False
    cause = blame(run)
    return "mixed torch.Tensor and DTensor" in cause.error and culprit(run, cause)[0] == "root-not-wrapped"


def _around_forward(frames: list[Record], cause: Blame) -> Record | None:
    """The user's line that runs a module with sharded weights by another way than the call of its FSDP module."""
    at = None
    for k, frame in enumerate(frames):
        if frame["own"] and frame.get("fsdp") and frame["shards_below"] > 0 and not _called(frames[k + 1 :], frame):
            at = k  # a method, or forward by name; the outermost one is what the script calls
    if at is None:
        parts = (
            k for k, f in enumerate(frames) if not f.get("fsdp", True) and f["shards"] and f["function"] == "forward"
        )
        at = next(parts, None)
    if at is None:
        return None
    wanted = next((f for f in frames[at + 1 :] if f["own"]), frames[at])
    return next((f for f in cause.frames if (f["file"], f["line"]) == (wanted["file"], wanted["line"])), cause.location)


def _called(outer: list[Record], frame: Record) -> bool:
    """Whether the frame's module was called as `module(...)`, which runs its hooks."""
    return any(f.get("number") == frame["number"] and f["function"] == "_call_impl" for f in outer)


class MixedRule(RaisedRule):
    """One of the faults that torch tells as MIXED."""

    pattern = MIXED

    def fits(self, run: Run, cause: Blame) -> bool:
        return culprit(run, cause)[0] == self.name

    def place(self, run: Run, cause: Blame) -> Record | None:
        return culprit(run, cause)[1] or cause.location


class CustomForwardBypass(MixedRule):
    """A sharded module is run through its `forward`, or through a method registered for FSDP.

    Why: FSDP gathers weights in hooks around `module(...)`. A method of your own (`generate`, `encode`,
    `compute_loss`), or a submodule that is no FSDP module itself, runs without them and meets the shards.
    Wrong:
        hidden = model.embedding(batch)  # raises RuntimeError
    Right:
        logits = model(batch)
    Mend: Call `register_fsdp_forward_method(model, "method")` after `fully_shard(model)`, or go through `model(...)`.
    Source: pytorch PR#125394; huggingface/transformers#30228; pytorch#156535; huggingface/trl#4550.
    Torch: run on 2.13.0.
    """

    name = "custom-forward-bypass"
    family = "wrapping"


class WeightUsedOutsideForward(MixedRule):
    """A sharded weight is used as a tensor only inside the forward of the FSDP module that owns it.

    Why: outside, `model.head.weight` is a DTensor that holds a shard, and torch refuses to mix it with plain tensors: a
    fused linear and cross entropy, a tied projection, a penalty on weights, a moving average in plain tensors.
    Wrong:
        hidden = torch.randn(4, 8)
        logits = F.linear(hidden, model.head.weight)  # raises RuntimeError
    Right:
        logits = model(batch)  # the forward uses the head
    Mend: Compute it inside the forward of the FSDP module that owns the weight. Where the other tensor is a copy of the
    weights (a moving average), make that copy from the sharded model.
    Source: meta-pytorch/torchtune PR#2800; apple/ml-cross-entropy#31; linkedin/Liger-Kernel#332.
    Torch: run on 2.13.0.
    """

    name = "weight-used-outside-forward"
    family = "wrapping"


class FullSdIntoDtensor(MixedRule):
    """Whole tensors are loaded into a sharded model or optimizer by the distributed state-dict functions.

    Why: after `fully_shard` the weights are DTensors; `model.load_state_dict`, `param.copy_` and
    `optimizer.load_state_dict` take whole tensors as they are and do not cut them.
    Wrong:
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        shard(model)
        model.load_state_dict(whole)  # raises RuntimeError
    Right:
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        shard(model)
        set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    Mend: Use `set_model_state_dict` or `set_optimizer_state_dict` with `options=StateDictOptions(full_state_dict=True)`
    (and `broadcast_from_rank0=True` if only rank 0 has the tensors), or load before sharding.
    Source: pytorch#136336; pytorch PR#124651.
    Torch: run on 2.13.0.
    """

    name = "full-sd-into-dtensor"
    family = "init"


class DdpAroundFsdp(MixedRule):
    """A model is sharded by `fully_shard` or wrapped in DDP, never both.

    Why: DDP copies and averages whole plain tensors; a model of DTensors is not its business, and FSDP already averages.
    Wrong:
        shard(model)
        model = nn.parallel.DistributedDataParallel(model)  # raises RuntimeError
    Right:
        shard(model)
    Mend: Delete the wrapping in DistributedDataParallel; for replicas of shards give `fully_shard` a 2-D mesh.
    Source: the documentation of `fully_shard` (HSDP by a 2-D mesh).
    Torch: run on 2.13.0.
    """

    name = "ddp-around-fsdp"
    family = "wrapping"
    pattern = rf"{MIXED}|does not have a sharding strategy registered"

    def fits(self, run: Run, cause: Blame) -> bool:
        return wrapped_in_ddp(run, cause)


RULES = (FullSdIntoDtensor, DdpAroundFsdp, CustomForwardBypass, WeightUsedOutsideForward)
