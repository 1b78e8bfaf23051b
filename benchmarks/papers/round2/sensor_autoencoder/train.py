"""Denoising autoencoder for machine sensor frames, trained for a number of epochs.

Warm-up and linear decay run over the whole training; gradients are accumulated.
"""
import math
import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class TrainingArguments:
    epochs: int = 6
    global_batch: int = 32
    accumulation: int = 2
    learning_rate: float = 6e-3
    warmup_ratio: float = 0.1
    max_grad_norm: float = 1.0
    log_every: int = 8
    seed: int = 15


@dataclass
class TrainerState:
    step: int = 0
    max_steps: int = 0
    epoch: int = 0
    log: list = field(default_factory=list)


class ResidualMLP(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Autoencoder(nn.Module):
    def __init__(self, sensors, dim=32, code=6):
        super().__init__()
        self.inp = nn.Linear(sensors, dim)
        self.encoder = nn.ModuleList(ResidualMLP(dim, 2 * dim) for _ in range(2))
        self.squeeze, self.expand = nn.Linear(dim, code), nn.Linear(code, dim)
        self.decoder = nn.ModuleList(ResidualMLP(dim, 2 * dim) for _ in range(2))
        self.out = nn.Linear(dim, sensors)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.encoder:
            x = layer(x)
        x = self.expand(self.squeeze(x))
        for layer in self.decoder:
            x = layer(x)
        return self.out(x)


def frames(count, seed, sensors=20):
    """Sensors respond to five hidden causes, some of them through a saturation."""
    mix = torch.randn(5, sensors, generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(seed)
    clean = torch.tanh(torch.randn(count, 5, generator=g) @ mix)
    return clean + 0.2 * torch.randn(count, sensors, generator=g), clean


class Trainer:
    def __init__(self, model, args, train_set, eval_set, device):
        self.model, self.args, self.device = model, args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.eval_noisy, self.eval_clean = (t.to(device) for t in eval_set.tensors)
        micro = args.global_batch // args.accumulation // self.world
        self.sampler = DistributedSampler(train_set, self.world, self.rank, seed=args.seed)
        self.loader = DataLoader(train_set, micro, sampler=self.sampler, drop_last=True)
        self.state = TrainerState(max_steps=self.total_steps())
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.factor)

    def total_steps(self):
        per_epoch = len(self.loader) // self.args.accumulation
        return math.ceil(self.args.epochs * per_epoch)

    def factor(self, step):
        warmup = max(1, int(self.args.warmup_ratio * self.state.max_steps))
        if step < warmup:
            return (step + 1) / warmup
        return max(0.0, (self.state.max_steps - step) / (self.state.max_steps - warmup))

    def average(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / self.world

    def update(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.state.step += 1

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        own = slice(self.rank, None, self.world)
        error = F.mse_loss(self.model(self.eval_noisy[own]), self.eval_clean[own])
        self.model.train()
        return self.average(error)

    def train(self):
        args, state = self.args, self.state
        accumulated = torch.zeros((), device=self.device)
        while state.step < state.max_steps:
            self.sampler.set_epoch(state.epoch)
            for i, (noisy, clean) in enumerate(self.loader):
                last = (i + 1) % args.accumulation == 0
                self.model.set_requires_gradient_sync(last)
                loss = F.mse_loss(self.model(noisy.to(self.device)), clean.to(self.device)) / args.accumulation
                loss.backward()
                accumulated += loss.detach()
                if not last:
                    continue
                self.update()
                if state.step % args.log_every == 0:
                    shown = self.average(accumulated / args.log_every)
                    accumulated.zero_()
                    lr = self.scheduler.get_last_lr()[0]
                    state.log.append(shown)
                    if self.rank == 0:
                        print(f"step {state.step}: loss {shown:.5f} lr {lr:.5f}", flush=True)
                if state.step >= state.max_steps:
                    break
            state.epoch += 1
        error = self.evaluate()
        if self.rank == 0:
            print(f"training completed, step {state.step}, eval mse {error:.6f}")


def main():
    args = TrainingArguments()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(args.seed)
    model = Autoencoder(20).to(device)
    for layer in [*model.encoder, *model.decoder]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train_set, eval_set = TensorDataset(*frames(320, 2)), TensorDataset(*frames(96, 3))
    Trainer(model, args, train_set, eval_set, device).train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
