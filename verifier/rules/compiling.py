"""Rules on `torch.compile` and activation checkpointing beside `fully_shard`."""

from __future__ import annotations

from .base import SourceRule


class AcCompileOrder(SourceRule):
    """Of each block: first activation checkpointing, then compilation, then sharding.

    Why: a checkpoint around a compiled block leaves `_orig_mod` in the names of its parameters, in saved state dicts
    too, and may recompute other tensors than the forward kept. A checkpoint around a sharded block recomputes through
    the hooks that gather its parameters, and gathers them once more.
    Wrong:
        for number, block in enumerate(model.blocks):
            fully_shard(block)
            model.blocks[number] = checkpoint_wrapper(block)
        fully_shard(model)
    Right:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = checkpoint_wrapper(block)
            model.blocks[number].compile(backend="eager")  # in place: the names stay as they are
            fully_shard(model.blocks[number])
        fully_shard(model)
    Mend: Wrap each block with `checkpoint_wrapper`, then call its method `compile`, then `fully_shard` it, and shard the
    root last.
    Source: Modalities/modalities#361; pytorch/torchtitan#472, #2622.
    Torch: the names were seen on 2.13.0.
    """

    name = "ac-compile-order"
    family = "compile"


RULES = (AcCompileOrder,)
