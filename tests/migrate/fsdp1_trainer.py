"""FSDP1 in a class, with every argument; state dicts by the functions of the class."""

import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.linear(x))


class Trainer:
    def __init__(self, frozen):
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        precision = MixedPrecision(  # -> MixedPrecision buffer_dtype; MixedPrecision keep_low_precision_grads
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.bfloat16,
            buffer_dtype=torch.bfloat16,
            keep_low_precision_grads=True,
        )
        self.model = FSDP(  # -> FullyShardedDataParallel
            nn.Sequential(Block(), Block(), nn.Linear(8, 4)),
            process_group=dist.group.WORLD,  # -> FSDP process_group
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,  # -> FSDP sharding_strategy=SHARD_GRAD_OP
            cpu_offload=CPUOffload(offload_params=True),  # -> FSDP cpu_offload
            auto_wrap_policy=policy,  # -> FSDP auto_wrap_policy by class
            backward_prefetch=BackwardPrefetch.BACKWARD_POST,  # -> FSDP backward_prefetch
            mixed_precision=precision,  # -> FSDP mixed_precision
            ignored_modules=[frozen],  # -> FSDP ignored_modules
            param_init_fn=lambda module: module.to_empty(device="cpu"),  # -> FSDP param_init_fn
            device_id=torch.device("cpu"),  # -> FSDP device_id
            sync_module_states=True,  # -> FSDP sync_module_states
            forward_prefetch=True,  # -> FSDP forward_prefetch
            limit_all_gathers=True,  # -> FSDP limit_all_gathers
            use_orig_params=True,  # -> FSDP use_orig_params
        )
        apply_activation_checkpointing(  # -> activation checkpointing after the wrapper
            self.model, check_fn=lambda module: isinstance(module, Block)
        )
        self.compiled = torch.compile(self.model)  # -> torch.compile of the model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = ShardedGradScaler()  # -> ShardedGradScaler

    def step(self, micros):
        for x, y in micros[:-1]:
            with self.model.no_sync():  # -> with no_sync()
                F.cross_entropy(self.model(x), y).backward()
        x, y = micros[-1]
        F.cross_entropy(self.model(x), y).backward()
        norm = self.model.clip_grad_norm_(1.0)  # -> clip_grad_norm_ of the wrapper
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()

    def save(self, path):
        full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)  # -> FullStateDictConfig
        optim = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)  # -> FullStateDictConfig
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, full, optim):  # -> state_dict_type
            model = self.model.state_dict()  # -> model.state_dict()
            optimizer = FSDP.optim_state_dict(self.model, self.optimizer)  # -> optim_state_dict
        if dist.get_rank() == 0:
            torch.save({"model": model, "optimizer": optimizer}, path)  # -> torch.save

    def load(self, path):
        state = torch.load(path, weights_only=True)  # -> torch.load
        with FSDP.state_dict_type(self.model, StateDictType.FULL_STATE_DICT):  # -> state_dict_type
            self.model.load_state_dict(state["model"])  # -> model.load_state_dict(...)
            loaded = FSDP.optim_state_dict_to_load(  # -> optim_state_dict_to_load
                self.model, self.optimizer, state["optimizer"]
            )
        self.optimizer.load_state_dict(loaded)  # -> optimizer.load_state_dict(...)

    def weights(self):
        with FSDP.summon_full_params(self.model):  # -> summon_full_params
            found = {name: param.clone() for name, param in self.model.named_parameters()}
        parts = FSDP.fsdp_modules(self.model)  # -> fsdp_modules
        inner = [m for m in parts if isinstance(m, FSDP)]  # -> isinstance of the wrapper
        return found, inner


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    trainer = Trainer(nn.Linear(8, 8))
    for _ in range(2):
        trainer.step([(torch.randn(4, 8), torch.randint(0, 4, (4,))) for _ in range(2)])
    trainer.save("state.pt")
    trainer.load("state.pt")
    trainer.weights()


if __name__ == "__main__":
    main()
