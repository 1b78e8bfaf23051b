from ...source.events import Flow, covers
from ...source.flow_queries import first_text
from ..base import Hits, SourceRule
from ..policies import OnlyWarns


class AcCompileOrder(SourceRule):
    """Each block is wrapped for activation checkpointing, then compiled, then sharded.

    Why: checkpointing a compiled block leaves `_orig_mod` in its parameter names, also in saved
    state dicts, which `wrapper-prefix-keys` shows in a run. Checkpointing a sharded block made the
    same gradients with as many all-gathers: the order is a convention there.
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
    Fix: For each block call `checkpoint_wrapper`, then its method `compile` (if used), then
    `fully_shard`; shard the root last.
    Source: Modalities/modalities#361; pytorch/torchtitan#472, #2622.
    Torch: the names were seen on 2.13.0.
    """

    # gradients and all-gathers are equal in either order (aws-samples/awsome-distributed-training)
    policies = (OnlyWarns(),)
    named_by = ("checkpoint_wrapper", "apply_activation_checkpointing")

    def detect(self, flow: Flow) -> Hits:
        for event in flow.ops("ac.checkpoint_wrapper", "ac.apply_activation_checkpointing"):
            if not event.args:
                continue
            module = event.args[0]
            compiled = [e for e in flow.ops("torch.compile") if e.args and e.result is module]
            compiled += [e for e in flow.methods("compile") if e.on is module and covers(e, event)]
            # Right order: checkpoint wrapper, then compile, then fully_shard. Only a module that is
            # already sharded or compiled is wrapped too late (examples/ (compile after
            # checkpointing after no sharding)).
            if (shard := flow.managed_by(module, event)) is not None:
                what = (
                    f"sharded in line {shard.line}, before it is wrapped for activation"
                    " checkpointing here"
                )
            elif compiled:
                what = (
                    f"compiled in line {compiled[0].line}, before it is wrapped for activation"
                    " checkpointing here"
                )
            else:
                continue
            yield f"{first_text(event)} is {what}", event
