"""Fine-tuning without backward passes: two forward passes a direction, gradient by finite differences (after MeZO).

The base model is frozen, a soft prompt, the norms and an output bias are tuned. Directions are drawn from a seed, so
that nothing but a seed and one number a direction has to be kept.
"""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

VOCAB, DIM, PROMPT, LEN = 24, 16, 2, 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.qkv, self.o = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class PromptedLM(nn.Module):
    def __init__(self, depth=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(LEN + PROMPT, DIM)
        self.prompt = nn.Parameter(torch.zeros(PROMPT, DIM))
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = nn.RMSNorm(DIM)
        self.head, self.bias = nn.Linear(DIM, VOCAB, bias=False), nn.Parameter(torch.zeros(VOCAB))

    def forward(self, ids):
        x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.tok(ids)], 1)
        x = x + self.pos.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))[:, PROMPT:] + self.bias


def jargon(step, rows=16):
    """Text of a narrow domain: few words make up most of it."""
    g = torch.Generator().manual_seed(step)
    return torch.multinomial(torch.arange(1.0, VOCAB + 1) ** -1.6, rows * (LEN + 1), replacement=True, generator=g).view(rows, -1)


class ForwardOnly:
    def __init__(self, model, names, lr, eps, directions):
        self.model, self.lr, self.eps, self.directions = model, lr, eps, directions
        self.tuned = [(n, p) for n, p in model.named_parameters() if names(n)]

    def noise(self, seed):
        """The same full direction on every rank, cut to the rows which the rank holds."""
        g = torch.Generator().manual_seed(seed)
        for _, p in self.tuned:
            z = torch.randn(p.shape, generator=g)
            yield p.to_local(), distribute_tensor(z, p.device_mesh, p.placements, src_data_rank=None).to_local()

    def shift(self, seed, by):
        for w, z in self.noise(seed):
            w.add_(z, alpha=by)

    @torch.no_grad()
    def step(self, step, loss_fn):
        seeds = [step * self.directions + k for k in range(self.directions)]
        home = [p.to_local().clone() for _, p in self.tuned]
        slopes, losses = [], []
        for seed in seeds:
            self.shift(seed, self.eps)
            up = loss_fn()
            self.go_home(home)
            self.shift(seed, -self.eps)
            down = loss_fn()
            self.go_home(home)
            slopes.append((up - down) / (2 * self.eps))
            losses.append((up + down) / 2)
        for seed, slope in zip(seeds, slopes):
            self.shift(seed, -self.lr * slope / self.directions)
        return sum(losses) / len(losses)

    def go_home(self, home):
        for (_, p), w in zip(self.tuned, home):
            p.to_local().copy_(w)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--lr", type=float, default=0.2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = PromptedLM().requires_grad_(False)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=True)
    tuner = ForwardOnly(model, lambda n: n in ("prompt", "bias") or "norm" in n, a.lr, eps=1e-2, directions=4)

    begin = 0
    if a.resume:
        with open(os.path.join(a.resume, "latest.json")) as f:
            begin = json.load(f)["step"]
        tuned = torch.load(os.path.join(a.resume, f"tuned_{begin}.pt"))
        for n, p in tuner.tuned:
            p.copy_(distribute_tensor(tuned[n], p.device_mesh, p.placements))

    for step in range(begin, a.steps):
        ids = jargon(step)[rank::world]

        def loss_fn():
            loss = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:]).double() / world
            dist.all_reduce(loss)
            return loss.item()

        loss = tuner.step(step, loss_fn)
        if rank == 0 and (step + 1) % 5 == 0:
            print(f"step {step + 1} loss {loss:.4f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0 and step + 1 < a.steps:
            tuned = {n: p.full_tensor().clone() for n, p in tuner.tuned}
            if rank == 0:
                os.makedirs(a.out, exist_ok=True)
                torch.save(tuned, os.path.join(a.out, f"tuned_{step + 1}.pt"))
                with open(os.path.join(a.out, "latest.json"), "w") as f:
                    json.dump({"step": step + 1}, f)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
