from ..base import Flow, Hits
from ..raised import ShardedRule
from ._base import called_on_sharded


class Fsdp1Idiom(ShardedRule):
    """Methods and arguments of FSDP1 and DDP are replaced by their FSDP2 equivalents.

    Why: FSDP2 does not wrap the model: there is no `.module`, `clip_grad_norm_` or
    `summon_full_params`, and `fully_shard` accepts neither `sharding_strategy` nor
    `auto_wrap_policy`.
    Wrong:
        model.clip_grad_norm_(max_norm)  # raises AttributeError
    Right:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    Fix: `model.module` is `model`; `model.clip_grad_norm_(x)` is
    `torch.nn.utils.clip_grad_norm_(model.parameters(), x)`; `summon_full_params` is
    `get_model_state_dict` with `full_state_dict=True`; a sharding strategy is
    `reshard_after_forward` and the mesh; a wrap policy is one call of `fully_shard` for each block.
    Source: the FSDP1-to-FSDP2 guide in pytorch's `fully_shard` tutorial.
    """

    pattern = (
        r"'FSDP\w*' object has no attribute"
        r" '(module|clip_grad_norm_|summon_full_params|state_dict_type|full_optim_state_dict|"
        r"_fsdp_wrapped_module|set_state_dict_type|optim_state_dict)'|"
        r"fully_shard\(\) got an unexpected keyword argument"
    )

    def detect(self, flow: Flow) -> Hits:
        for event in called_on_sharded(
            flow, "clip_grad_norm_", "summon_full_params", "full_optim_state_dict"
        ):
            yield f"a module sharded by fully_shard has no `{event.method}`", event
