"""Forecasts electricity load with a small mixture-of-experts network.

The dense weights and the experts have an optimizer each (own learning rate and
betas), chained behind one interface.
"""

import argparse
import dataclasses
import math
import os
from argparse import Namespace
from typing import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

HISTORY, HORIZON = 24, 4


@dataclasses.dataclass
class OptimizerConfig:
    lr: float = 3e-3
    expert_lr: float = 2e-3
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    clip_grad: float = 1.0


class ExpertLayer(nn.Module):
    def __init__(self, dim: int, num_experts: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Linear(dim, num_experts)
        self.experts_in = nn.Parameter(torch.randn(num_experts, dim, 2 * dim) / math.sqrt(dim))
        self.experts_out = nn.Parameter(torch.randn(num_experts, 2 * dim, dim) / math.sqrt(2 * dim))

    def forward(self, x):
        h = self.norm(x)
        gate, index = self.router(h).softmax(-1).topk(2, dim=-1)
        gates = torch.zeros(*h.shape[:-1], self.router.out_features, device=h.device).scatter(-1, index, gate)
        up = F.gelu(torch.einsum("bd,edh->beh", h, self.experts_in))
        return x + torch.einsum("beh,ehd,be->bd", up, self.experts_out, gates)


class Forecaster(nn.Module):
    def __init__(self, dim: int = 20, depth: int = 2, num_experts: int = 4):
        super().__init__()
        self.input = nn.Sequential(nn.Linear(HISTORY, dim), nn.GELU(), nn.Linear(dim, dim))
        self.layers = nn.ModuleList(ExpertLayer(dim, num_experts) for _ in range(depth))
        self.output = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, HORIZON))

    def forward(self, history):
        x = self.input(history)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


class WrappedOptimizer:
    """One torch optimizer with its settings; init_state_fn fills the state up front."""

    def __init__(self, optimizer: torch.optim.Optimizer, config: OptimizerConfig, init_state_fn: Callable | None = None):
        self.optimizer, self.config, self.init_state_fn = optimizer, config, init_state_fn

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def zero_grad(self):
        self.optimizer.zero_grad(set_to_none=True)

    def step(self):
        params = [p for group in self.param_groups for p in group["params"]]
        grad_norm = nn.utils.clip_grad_norm_(params, self.config.clip_grad).full_tensor().item()
        self.optimizer.step()
        return grad_norm


class ChainedOptimizer:
    def __init__(self, optimizers: list[WrappedOptimizer]):
        self.chained_optimizers = optimizers

    @property
    def param_groups(self):
        return [group for o in self.chained_optimizers for group in o.param_groups]

    def zero_grad(self):
        for o in self.chained_optimizers:
            o.zero_grad()

    def step(self):
        return math.sqrt(sum(o.step() ** 2 for o in self.chained_optimizers))


def init_adam_state(optimizer: torch.optim.Optimizer, config: OptimizerConfig):
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }


def get_optimizer(config: OptimizerConfig, model: nn.Module) -> ChainedOptimizer:
    dense = [p for n, p in model.named_parameters() if ".experts_" not in n]
    experts = [p for n, p in model.named_parameters() if ".experts_" in n]
    betas = (config.adam_beta1, config.adam_beta2)
    return ChainedOptimizer(
        [
            WrappedOptimizer(
                torch.optim.AdamW(dense, lr=config.lr, betas=betas, weight_decay=config.weight_decay),
                config,
                init_adam_state,
            ),
            WrappedOptimizer(
                torch.optim.AdamW(experts, lr=config.expert_lr, betas=betas, weight_decay=0.0),
                config,
                init_adam_state,
            ),
        ]
    )


class WarmupCosine:
    def __init__(self, optimizer, warmup: int, total: int):
        self.optimizer, self.warmup, self.total, self.num_steps = optimizer, warmup, total, 0
        self.max_lrs = [group["lr"] for group in optimizer.param_groups]
        self.step(0)

    def step(self, increment: int = 1):
        self.num_steps += increment
        if self.num_steps < self.warmup:
            scale = (self.num_steps + 1) / self.warmup
        else:
            progress = (self.num_steps - self.warmup) / max(1, self.total - self.warmup)
            scale = 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group, lr in zip(self.optimizer.param_groups, self.max_lrs):
            group["lr"] = lr * scale


def setup_model_and_optimizer(args: Namespace, mesh: DeviceMesh, device: torch.device):
    """Builds and shards the model, and constructs its optimizer and schedule."""
    torch.manual_seed(args.seed)
    model = Forecaster().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    kwargs = {}
    for f in dataclasses.fields(OptimizerConfig):
        if hasattr(args, f.name):
            kwargs[f.name] = getattr(args, f.name)
    config = OptimizerConfig(**kwargs)

    optimizer = get_optimizer(config, model)
    scheduler = WarmupCosine(optimizer, args.warmup, args.steps)
    for sub_optimizer in optimizer.chained_optimizers:
        if sub_optimizer.init_state_fn is None:
            continue
        sub_optimizer.init_state_fn(sub_optimizer.optimizer, sub_optimizer.config)

    return model, optimizer, scheduler


def make_windows(n: int, seed: int):
    """Daily load curves of several household types with noise."""
    g = torch.Generator().manual_seed(seed)
    hours = torch.arange(HISTORY + HORIZON)
    phase = 24 * torch.rand(n, 1, generator=g)
    kind = torch.randint(0, 3, (n, 1), generator=g)
    level = 0.5 + torch.rand(n, 1, generator=g)
    period = torch.tensor([24.0, 12.0, 8.0])[kind]
    load = level * torch.sin(2 * math.pi * (hours + phase) / period) + 0.2 * kind
    load = load + 0.05 * torch.randn(load.shape, generator=g)
    return load[:, :HISTORY], load[:, HISTORY:]


def all_mean(value: torch.Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model, rank, world_size, device):
    model.eval()
    history, target = make_windows(256, seed=10_000)
    part = slice(rank * 256 // world_size, (rank + 1) * 256 // world_size)
    mse = all_mean(F.mse_loss(model(history[part].to(device)), target[part].to(device)))
    model.train()
    return mse


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--expert-lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))
    model, optimizer, scheduler = setup_model_and_optimizer(args, mesh, device)

    history, target = make_windows(args.steps * args.global_batch_size, args.seed)
    per_rank = args.global_batch_size // world_size
    for step in range(args.steps):
        start = step * args.global_batch_size + rank * per_rank
        x, y = history[start : start + per_rank].to(device), target[start : start + per_rank].to(device)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        grad_norm = optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        loss = all_mean(loss)
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            print(f"step {step} mse {loss:.6f} grad_norm {grad_norm:.5f}", flush=True)

    mse = evaluate(model, rank, world_size, device)
    if rank == 0:
        print(f"test mse {mse:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
