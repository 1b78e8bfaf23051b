"""FSDP1 with `wrap`, by position and by module alias: a hybrid strategy, a policy by size, the old optimizer states."""

import functools

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter, save_state_dict
from torch.distributed.fsdp.wrap import enable_wrap, size_based_auto_wrap_policy, wrap

STRATEGY = fsdp.ShardingStrategy.HYBRID_SHARD


def build(group):
    with enable_wrap(wrapper_cls=fsdp.FullyShardedDataParallel, sharding_strategy=STRATEGY):  # -> enable_wrap, wrap
        inner = wrap(nn.Linear(8, 8))  # -> enable_wrap, wrap
    options = {"sharding_strategy": STRATEGY, "mixed_precision": None, "ignored_states": list(inner.parameters())}
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=10)
    # On the first line: what is given by position, or in the dictionary.
    sharded = fsdp.FullyShardedDataParallel
    return sharded(  # -> FullyShardedDataParallel; FSDP process_group; FSDP ignored_states; FSDP sharding_strategy=HYBRID_SHARD
        nn.Sequential(inner, nn.Linear(8, 8)),
        group,
        auto_wrap_policy=policy,  # -> FSDP auto_wrap_policy by size
        cpu_offload=fsdp.CPUOffload(offload_params=False),  # -> FSDP cpu_offload=CPUOffload(False)
        **options,
    )


def states(model, optimizer):
    full = fsdp.FullyShardedDataParallel.full_optim_state_dict(model, optimizer)  # -> optim_state_dict
    mine = fsdp.FullyShardedDataParallel.scatter_full_optim_state_dict(full, model)  # -> optim_state_dict_to_load
    fsdp.FullyShardedDataParallel.set_state_dict_type(  # -> state_dict_type
        model,
        fsdp.StateDictType.SHARDED_STATE_DICT,
        fsdp.ShardedStateDictConfig(offload_to_cpu=True),  # -> ShardedStateDictConfig
        fsdp.ShardedOptimStateDictConfig(),  # -> ShardedStateDictConfig
    )
    state = {"model": model.state_dict()}  # -> model.state_dict()
    save_state_dict(state, FileSystemWriter("out"))  # -> dcp.save_state_dict
    fsdp.LocalStateDictConfig()  # -> LocalStateDictConfig
    optimizer.load_state_dict(mine)  # -> optimizer.load_state_dict(...)


def main():
    dist.init_process_group("gloo")
    model = build(dist.group.WORLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 8)).sum().backward()
    model.clip_grad_norm_(1.0)  # -> clip_grad_norm_ of the wrapper
    optimizer.step()
    states(model, optimizer)


if __name__ == "__main__":
    main()
