"""Pre-training with embedding noise and word dropout in every block; the blocks are recomputed in the backward pass."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, LENGTH = 48, 32, 24


class NoisyMixer(nn.Module):
    """causal depthwise convolution + gated MLP with multiplicative noise on the hidden units"""

    def __init__(self, rate, seed):
        super().__init__()
        self.rate = rate
        self.norm = nn.LayerNorm(DIM)
        self.conv = nn.Conv1d(DIM, DIM, 5, groups=DIM)
        self.gate, self.value, self.out = nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, like):
        return torch.rand(like.shape)

    def forward(self, x):
        h = self.norm(x)
        h = self.conv(F.pad(h.transpose(1, 2), (4, 0))).transpose(1, 2)
        h = torch.sigmoid(self.gate(h)) * self.value(h)
        if self.training and self.rate > 0:
            keep = (self.draw(h) >= self.rate).to(h.dtype)
            h = h * keep / (1 - self.rate)
        return x + self.out(h)


class LM(nn.Module):
    def __init__(self, depth, rate, recompute, seed):
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(NoisyMixer(rate, 1000 * seed + i) for i in range(depth))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            if self.recompute and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


def corpus(n_tokens=20_000):
    """second-order rule with noise: the next token depends on the two before"""
    g = torch.Generator().manual_seed(5)
    noise, random = torch.rand(n_tokens, generator=g), torch.randint(0, VOCAB, (n_tokens,), generator=g)
    tokens = [1, 2]
    for i in range(2, n_tokens):
        tokens.append(int(random[i]) if noise[i] < 0.1 else (tokens[-1] + tokens[-2] // 16 + 1) % VOCAB)
    return torch.tensor(tokens)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=25)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--drop", type=float, default=0.3)
    ap.add_argument("--no-recompute", action="store_true")
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = LM(3, args.drop, not args.no_recompute, seed=rank + 1)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(100 + rank)  # from here on every rank draws its own noise

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.steps, pct_start=0.2)
    data, order = corpus(), torch.Generator().manual_seed(9)
    for step in range(1, args.steps + 1):
        starts = torch.randint(0, len(data) - LENGTH - 1, (args.batch,), generator=order)[rank::world]
        rows = torch.stack([data[s : s + LENGTH + 1] for s in starts.tolist()])
        loss = F.cross_entropy(model(rows[:, :-1]).transpose(1, 2), rows[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step:3d}  loss {mean.item() / world:.4f}  lr {schedule.get_last_lr()[0]:.2e}", flush=True)

    if args.export:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
