import re

from ..base import RootCause, Run
from ..raised import MESHES, NO_STRATEGY, ShardedRule, stack, wrapped_in_ddp


class OpWithoutShardingStrategy(ShardedRule):
    """Operations on sharded parameters and gradients have a DTensor sharding strategy.

    Why: masks, `nonzero`, `numpy()`, in-place operations on partial results and some rare
    operations have none.
    Wrong:
        with torch.no_grad():
            large = model.head.weight[model.head.weight > 0]  # raises RuntimeError
    Right:
        with torch.no_grad():
            whole = model.head.weight.full_tensor()
            large = whole[whole > 0]
    Fix: Run the operation on `.full_tensor()` (on all ranks), or an elementwise one on
    `.to_local()`.
    Source: the messages of torch 2.13.0 in `torch/distributed/tensor`.
    """

    pattern = (
        rf"{NO_STRATEGY}|\.(numpy|tolist)\(\) is not supported for tensor"
        r" subclasses|^AssertionError: $"
    )

    def fits(self, run: Run, cause: RootCause) -> bool:
        frames = stack(run, cause)
        # `plain += sharded.norm()` raises an AssertionError without a text: it is this rule's only
        # if raised in torch.distributed.tensor, else it is the script's own.
        if cause.error == "AssertionError: " and not (
            frames and "torch/distributed/tensor/" in frames[0].file
        ):
            return False  # the text of `plain += sharded.norm()`; else an assertion of the script
        elsewhere = any(f.optimizer is not None for f in frames) or wrapped_in_ddp(run, cause)
        return not elsewhere and re.search(MESHES, cause.error) is None
