"""Rules on errors of `fully_shard` and of the sharded model, which torch tells in its own words."""

from __future__ import annotations

import re

from ..blame import Blame
from ..trace import Record, Run
from .base import RaisedRule


def last_shard(run: Run, cls: str = "") -> Record | None:
    """The user's line of the last call of `fully_shard` (on a module of class `cls`)."""
    lines = [r["at_line"] for r in run.places("shard") if r["at_line"] and cls in ("", *map(_short, r["modules"]))]
    return lines[-1] if lines else None


def _short(cls: str) -> str:
    return cls.rpartition(".")[2]


class ParentBeforeChild(RaisedRule):
    """`fully_shard` is called bottom-up: on the blocks first, on the root last.

    Why: the call on the root takes every parameter that no group has yet. The blocks then find DTensors, which
    `fully_shard` takes for tensor parallelism, and fails on their mesh with a text that does not say so.
    Wrong:
        fully_shard(model)
        for block in model.blocks:
            fully_shard(block)  # raises TypeError
    Right:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    Mend: Move the call on the root below the calls on its blocks.
    Source: the docstring of `fully_shard` ("should be called bottom-up").
    Torch: run on 2.13.0.
    """

    name = "parent-before-child"
    family = "wrapping"
    pattern = r"Invariant encountered: value was None when it should not be|Cannot concatenate overlapping meshes"

    def fits(self, run: Run, cause: Blame) -> bool:
        lines = [f["line"] for f in cause.frames]
        return any(r["at_line"] and r["at_line"]["line"] in lines for r in run.places("shard")) and not _parallel(cause)

    def place(self, run: Run, cause: Blame) -> Record | None:
        """The call before the one that failed: the parent's."""
        lines: list[Record] = [r["at_line"] for r in run.places("shard") if r["at_line"]]
        failed = lines[-1]
        return next((line for line in reversed(lines) if line["line"] != failed["line"]), failed)


def _parallel(cause: Blame) -> bool:
    """Whether the two meshes of the message differ: tensor parallelism is at work."""
    meshes = re.findall(r"DeviceMesh\((\([^)]*\))", cause.error)
    return len(set(meshes)) > 1


class ShardedTwice(RaisedRule):
    """`fully_shard` is called once on a module.

    Why: the second call would manage the parameters that the first one has; torch refuses it with the whole module
    as text. It comes from a loop over `model.modules()` that meets the root, or from a helper that shards inside.
    Wrong:
        shard(model)
        fully_shard(model)  # raises AssertionError
    Right:
        shard(model)
    Mend: Delete the second call, or leave the module out of the loop.
    Source: the message of torch 2.13.0 in `torch/distributed/_composable/contract.py`.
    Torch: run on 2.13.0.
    """

    name = "sharded-twice"
    family = "wrapping"
    pattern = r"can only be applied to a module once\. fully_shard has already been applied"


class SubmoduleForwardBeforeRoot(RaisedRule):
    """The first forward after sharding goes through the root, not through a block.

    Why: FSDP settles at the first forward which module is the root. A block that runs alone first (a shape probe, a
    FLOP count, a warm-up) takes itself for the root, and the real root then refuses to run.
    Wrong:
        shard(model)
        model.blocks[0](torch.randn(2, 3, 8))  # a probe
        model(batch)  # raises RuntimeError
    Right:
        model.blocks[0](torch.randn(2, 3, 8))  # a probe, before sharding
        shard(model)
        model(batch)
    Mend: Move the call on the block above the sharding, or call the root first.
    Source: torch 2.13.0 `_fsdp_state.py`.
    Torch: run on 2.13.0.
    """

    name = "submodule-forward-before-root"
    family = "wrapping"
    pattern = r"FSDP state has already been lazily initialized for (?P<module>\S+)"

    def place(self, run: Run, cause: Blame) -> Record | None:
        """The first call of any root: the probe."""
        lines = [r["at_line"] for r in run.places("model") if r["at_line"]]
        return lines[0] if lines else cause.location


class UnsupportedModuleOrParam(RaisedRule):
    """`fully_shard` gets modules with a forward, and parameters with a dimension that it can cut.

    Why: hooks sit on forward, which ModuleList and ModuleDict do not have; a 0-d parameter has nothing to cut; another
    dimension than 0 must be a multiple of the number of ranks; memory must be contiguous.
    Wrong:
        fully_shard(model.blocks)  # raises ValueError
    Right:
        for block in model.blocks:
            fully_shard(block)
    Mend: Shard each element of the container; make a scalar parameter 1-d (`torch.ones(1)`), a transposed one
    `.contiguous()`; shard on dimension 0 where the size is no multiple of the ranks.
    Source: pytorch#167856; pytorch PR#168905.
    Torch: run on 2.13.0.
    """

    name = "unsupported-module-or-param"
    family = "wrapping"
    pattern = (
        r"fully_shard does not support containers that do not implement forward|"
        r"fully_shard doesn't support scalar parameters|FSDP does not support uneven sharding on dim|"
        r"FSDP does not support non-contiguous parameters"
    )


class DeepcopyOfFsdpModel(RaisedRule):
    """A model is copied before it is sharded.

    Why: an FSDP module holds groups and hooks that no copy can share, so `copy.deepcopy`, and `AveragedModel` which
    uses it, refuse a sharded model.
    Wrong:
        import copy

        shard(model)
        average = copy.deepcopy(model)  # raises AssertionError
    Right:
        import copy

        average = copy.deepcopy(model)
        shard(model)
        shard(average)
    Mend: Copy before `fully_shard` and shard both; the weights of the copy are then DTensors of the same layout.
    Source: pytorch#149138; pytorch#82070.
    Torch: run on 2.13.0.
    """

    name = "deepcopy-of-fsdp-model"
    family = "wrapping"
    pattern = r"FSDP does not support deepcopy"


class PickledFsdpModel(RaisedRule):
    """A sharded model is saved by its state dict, never as an object.

    Why: `fully_shard` gives the module a class made on the fly, which Python cannot find again by its name.
    Wrong:
        import io

        torch.save(model, io.BytesIO())  # raises PicklingError
    Right:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    Mend: Save `get_model_state_dict(model)` with `dcp.save`, or with `full_state_dict=True` and `torch.save` on rank 0.
    Source: the message of torch 2.13.0; `torch.distributed.checkpoint.state_dict`.
    Torch: run on 2.13.0.
    """

    name = "pickled-fsdp-model"
    family = "checkpoint"
    pattern = r"Can't p\w+ <class 'torch\.distributed\.fsdp\._fully_shard\._fsdp_init\.FSDP"


class MetaNotMaterialized(RaisedRule):
    """A model built on the meta device gets memory and values before its first forward.

    Why: on the meta device there are shapes and no numbers. `fully_shard` keeps them so; the first forward refuses.
    Wrong:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model(batch)  # raises RuntimeError
    Right:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()
        model.init_buffers()
        model(batch)
    Mend: After `fully_shard` call `model.to_empty(device=...)`, then give every parameter and every buffer its values
    (the model's own initialisation, or a checkpoint).
    Source: pytorch PR#120351.
    Torch: run on 2.13.0.
    """

    name = "meta-not-materialized"
    family = "init"
    pattern = r"FSDP parameters should be materialized from meta device|Cannot copy out of meta tensor; no data!"

    def fits(self, run: Run, cause: Blame) -> bool:
        return last_shard(run) is not None

    def place(self, run: Run, cause: Blame) -> Record | None:
        """The last sharding: `to_empty` belongs below it."""
        return cause.location if "Cannot copy" in cause.error else last_shard(run) or cause.location


class ParameterReplacedAfterShard(RaisedRule):
    """No parameter object of a sharded model is replaced by another.

    Why: FSDP keeps the DTensor parameters that it made. A new `nn.Parameter` in their place (a new head, a resized
    embedding, `load_state_dict(..., assign=True)`) is none of its own, and the first gather fails.
    Wrong:
        shard(model)
        model.head.weight = nn.Parameter(torch.randn(16, 8))
        model(batch)  # raises AttributeError
    Right:
        model.head.weight = nn.Parameter(torch.randn(16, 8))
        shard(model)
        model(batch)
    Mend: Replace parameters (heads, embeddings, adapters) before `fully_shard`, and load without `assign=True` after it.
    Source: the message of torch 2.13.0 in `_fsdp_param.py`.
    Torch: run on 2.13.0.
    """

    name = "parameter-replaced-after-shard"
    family = "wrapping"
    pattern = r"'(Parameter|Tensor)' object has no attribute '_local_tensor'"

    def fits(self, run: Run, cause: Blame) -> bool:
        return last_shard(run) is not None


class InferenceModeBeforeTraining(RaisedRule):
    """Evaluation of a model that goes on to train runs under `torch.no_grad`, not under `torch.inference_mode`.

    Why: the first forward allocates the buffers of the gathered weights. Under inference mode they become inference
    tensors, which no later training forward may write.
    Wrong:
        shard(model)
        with torch.inference_mode():
            model(batch)
        model(batch)  # raises RuntimeError
    Right:
        shard(model)
        with torch.no_grad():
            model(batch)
        model(batch)
    Mend: Use `torch.no_grad()` in the place of `torch.inference_mode()`.
    Source: the message of torch 2.13.0; the documentation of `torch.inference_mode`.
    Torch: run on 2.13.0.
    """

    name = "inference-mode-before-training"
    family = "wrapping"
    pattern = r"Inplace update to inference tensor outside InferenceMode|Inference tensors do not track version counter"

    def fits(self, run: Run, cause: Blame) -> bool:
        return last_shard(run) is not None

    def place(self, run: Run, cause: Blame) -> Record | None:
        """The first forward, which was the one under inference mode."""
        lines = [r["at_line"] for r in run.places("model") if r["at_line"]]
        return lines[0] if lines else cause.location


RULES = (
    ParentBeforeChild,
    ShardedTwice,
    SubmoduleForwardBeforeRoot,
    UnsupportedModuleOrParam,
    DeepcopyOfFsdpModel,
    PickledFsdpModel,
    MetaNotMaterialized,
    ParameterReplacedAfterShard,
    InferenceModeBeforeTraining,
)
