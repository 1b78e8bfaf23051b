from ...source.flow_queries import is_known, made_by, parts_of
from ...source.values import Value
from ..base import Flow, Hits
from ..raised import ShardedRule


class UnsupportedModuleOrParam(ShardedRule):
    """`fully_shard` gets modules with a forward, and parameters that it can shard.

    Why: its hooks wrap forward, which ModuleList and ModuleDict do not have; a 0-d parameter has no
    dim to shard; the size of a dim other than 0 must be a multiple of the number of ranks; memory
    must be contiguous.
    Wrong:
        fully_shard(model.blocks)  # raises ValueError
    Right:
        for block in model.blocks:
            fully_shard(block)
    Fix: Shard each element of the container; make a scalar parameter 1-d (`torch.ones(1)`), a
    transposed one `.contiguous()`; shard on dim 0 where the size is not a multiple of the number of
    ranks.
    Source: pytorch#167856; pytorch PR#168905.
    """

    pattern = (
        r"fully_shard does not support containers that do not implement forward|"
        r"fully_shard doesn't support scalar parameters|FSDP does not support uneven sharding on"
        r" dim|"
        r"FSDP does not support non-contiguous parameters"
    )

    def detect(self, flow: Flow) -> Hits:
        for event, module in flow.shards:
            if made_by(module, "torch.nn.ModuleList", "torch.nn.ModuleDict") is not None:
                yield (
                    (
                        f"fully_shard is given a {module.name.rpartition('.')[2]}, which has no"
                        " forward"
                    ),
                    event,
                )
            elif is_known(flow, module) and "ignored_params" not in event.kwargs and not event.open:
                for name, part in parts_of(module):
                    made = made_by(part, "torch.nn.Parameter")
                    if made is not None and made.args and _is_scalar(made.args[0]):
                        yield (
                            (
                                f"{module.name}.{name} is a 0-d parameter, which fully_shard does"
                                " not support"
                            ),
                            made,
                        )


def _is_scalar(value: Value) -> bool:
    if value.kind != "made" or value.event is None:
        return False
    shape = value.event.arg(0, "size")
    if (
        value.name in ("torch.zeros", "torch.ones", "torch.empty", "torch.rand", "torch.randn")
        and shape is not None
    ):
        return shape.kind in ("tuple", "list") and not shape.parts and shape.name != "many"
    number = value.event.arg(0, "data")
    return (
        value.name == "torch.tensor"
        and number is not None
        and isinstance(number.const, int | float)
    )
