from ..base import RaisedRule, RootCause, Run
from ..policies import AfterSharding


class UnfrozenAfterFirstForward(RaisedRule):
    """Parameters that are trained later are trainable in the first forward of their group.

    Seen: `RuntimeError: attempting to assign a gradient with dtype 'c10::BFloat16'` in a backward,
    after parameters were unfrozen.
    Why: FSDP2 makes the gathered parameters of a group in its first forward. Where they are frozen
    then, and `mp_policy` gathers them in another dtype than they have, torch 2.13 refuses their
    gradients once they are unfrozen.
    Wrong:
        shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model.blocks.requires_grad_(False)
        model(batch)
        model.blocks.requires_grad_(True)
        model(batch).mean().backward()  # raises RuntimeError
    Right:
        shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model(batch)  # all parameters are trainable
        model.blocks.requires_grad_(False)
        model(batch)
        model.blocks.requires_grad_(True)
        model(batch).mean().backward()
    Fix: Call the sharded model once, without backward, before parameters are frozen that are
    trained later.
    Source: pytorch#186998.
    """

    pattern = "attempting to assign a gradient with dtype"
    policies = (AfterSharding(),)

    def fits(self, run: Run, cause: RootCause) -> bool:
        frozen = any(not one.trainable for entries in run.parameters.values() for one in entries)
        return super().fits(run, cause) and frozen
