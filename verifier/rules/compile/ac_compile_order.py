from collections.abc import Iterator

from ...finding import Hit
from ...source.events import Flow, covers
from ...source.looks import first_text
from ...source.registry import detector
from ...source.values import holders
from ..base import SourceRule


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
    Fix: Wrap each block with `checkpoint_wrapper`, then call its method `compile`, then `fully_shard` it, and shard the
    root last.
    Source: Modalities/modalities#361; pytorch/torchtitan#472, #2622.
    Torch: the names were seen on 2.13.0.
    """

    named_by = ("checkpoint_wrapper", "apply_activation_checkpointing")


_WRAPPERS = ("ac.checkpoint_wrapper", "ac.apply_activation_checkpointing", "ac.checkpoint")


@detector("ac-compile-order")
def ac_compile_order(flow: Flow) -> Iterator[Hit]:
    compiled = [e for e in flow.ops("torch.compile") if e.args]
    in_place = [e for e in flow.methods("compile") if e.on is not None]
    for event in flow.ops(*_WRAPPERS[:2]):
        module = event.args[0] if event.args else None
        if module is None:
            continue
        shard = next((s for h in holders(module) if (s := flow.sharded_by(h, event)) is not None), None)
        if shard is not None:
            told = (
                f"{first_text(event)} is wrapped for activation checkpointing after it was sharded in line {shard.line}"
            )
            yield flow.hit("ac-compile-order", told, event)
            continue
        inside = [e for e in compiled if e.result is module] or [
            e for e in in_place if e.on is module and covers(e, event)
        ]
        if inside:
            told = f"{first_text(event)} is compiled in line {inside[0].line}, and checkpointed around that"
            yield flow.hit("ac-compile-order", told, event)
