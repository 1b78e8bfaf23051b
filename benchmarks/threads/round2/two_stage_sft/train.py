"""Two-stage language-model training: a broad first stage, then a short anneal on curated text.

Each stage has its own data mixture, peak learning rate and warmup/constant/decay
schedule. The Adam moments of the first stage are carried into the second one.
"""
import argparse
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ConstantLR, LinearLR, SequentialLR

VOCAB, SEQ, DIM = 40, 8, 32


@dataclass
class Stage:
    name: str
    steps: int
    lr: float
    warmup: int
    decay: int
    noise: float      # share of tokens that do not follow the grammar
    seed: int


STAGES = [
    Stage("base", steps=30, lr=4e-3, warmup=4, decay=10, noise=0.3, seed=100),
    Stage("anneal", steps=20, lr=2e-3, warmup=0, decay=6, noise=0.05, seed=200),
]


class Mixer(nn.Module):
    """Causal token mixing with a learned decay, followed by an MLP."""

    def __init__(self, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.decay = nn.Parameter(torch.linspace(-2.0, 2.0, dim))
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.norm1(x)
        k, v = torch.sigmoid(self.key(h)), self.value(h)
        rate = torch.sigmoid(self.decay)
        state, out = torch.zeros_like(v[:, 0]), []
        for t in range(x.size(1)):
            state = rate * state + k[:, t] * v[:, t]
            out.append(state)
        x = x + torch.stack(out, dim=1)
        return x + self.mlp(self.norm2(x))


class MixerLM(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Mixer(DIM) for _ in range(layers))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sample_batch(size, noise, seed):
    """Sequences of the grammar next = 3 * current + 7 (mod VOCAB), with noise tokens."""
    gen = torch.Generator().manual_seed(seed)
    seq = [torch.randint(VOCAB, (size,), generator=gen)]
    for _ in range(SEQ):
        nxt = (3 * seq[-1] + 7) % VOCAB
        wild = torch.rand(size, generator=gen) < noise
        seq.append(torch.where(wild, torch.randint(VOCAB, (size,), generator=gen), nxt))
    return torch.stack(seq, dim=1)


def make_scheduler(optimizer, stage):
    parts, milestones = [], []
    if stage.warmup:
        parts.append(LinearLR(optimizer, 1.0 / (stage.warmup + 1), 1.0, stage.warmup))
        milestones.append(stage.warmup)
    parts.append(ConstantLR(optimizer, factor=1.0))
    milestones.append(stage.steps - stage.decay)
    parts.append(LinearLR(optimizer, 1.0, 0.05, stage.decay))
    return SequentialLR(optimizer, parts, milestones)


def setup_optimization(model, stage, carried):
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.lr, betas=(0.9, 0.95),
                                  weight_decay=0.05)
    if carried is not None:
        set_optimizer_state_dict(model, optimizer, carried)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = stage.lr
    scheduler = make_scheduler(optimizer, stage)
    return optimizer, scheduler


def run_stage(model, stage, carried, args, device):
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer, scheduler = setup_optimization(model, stage, carried)
    model.train()
    for step in range(stage.steps):
        batch = sample_batch(args.batch_size, stage.noise, stage.seed + step)
        batch = batch[rank::world].to(device)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and (step % args.log_every == 0 or step == stage.steps - 1):
            print(f"{stage.name:>6s} {step:3d}  loss {shown.item() / world:.6f}")
    return get_optimizer_state_dict(model, optimizer)


@torch.no_grad()
def evaluate(model, device, size=64):
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    batch = sample_batch(size, 0.0, 31337)[rank::world].to(device)
    logits = model(batch[:, :-1])
    total = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
    dist.all_reduce(total)
    return total.item() / (size * SEQ)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)

    torch.manual_seed(args.seed)
    model = MixerLM().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model, reshard_after_forward=True)

    carried = None
    for stage in STAGES:
        carried = run_stage(model, stage, carried, args, device)
        clean = evaluate(model, device)
        if dist.get_rank() == 0:
            print(f"after {stage.name}: clean loss {clean:.6f}  perplexity {math.exp(clean):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
