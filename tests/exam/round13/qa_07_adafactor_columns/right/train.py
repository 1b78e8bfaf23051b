"""Continued pre-training with a factored second moment (Adafactor without momentum)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Adafactor(torch.optim.Optimizer):
    """Works on the rows of each parameter which this rank holds."""

    def __init__(self, params, lr, decay=0.9, clip=1.0, eps=1e-12):
        super().__init__(params, dict(lr=lr, decay=decay, clip=clip, eps=eps))

    @staticmethod
    def over_ranks(t):
        dist.all_reduce(t)
        return t

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g, w, s = p.grad.to_local(), p.to_local(), self.state[p]
                sq = g.square() + group["eps"]
                if not s:
                    s["t"] = 0
                    if p.ndim == 2:
                        s["row"], s["col"] = torch.zeros_like(w[:, 0]), torch.zeros_like(p[0].full_tensor())
                    else:
                        s["v"] = torch.zeros_like(w)
                s["t"] += 1
                beta = min(group["decay"], 1 - (s["t"] + 1) ** -0.8)
                if p.ndim == 2:
                    row = sq.mean(1)
                    col = self.over_ranks(sq.sum(0)) / p.shape[0]
                    s["row"].lerp_(row, 1 - beta)
                    s["col"].lerp_(col, 1 - beta)
                    total = self.over_ranks(s["row"].sum()) / p.shape[0]
                    update = g * (s["row"] / total).rsqrt()[:, None] * s["col"].rsqrt()
                else:
                    s["v"].lerp_(sq, 1 - beta)
                    update = g * s["v"].rsqrt()
                rms = (self.over_ranks(update.square().sum()) / p.numel()).sqrt()
                w.sub_(update / (rms / group["clip"]).clamp_min(1.0), alpha=group["lr"])


class Layer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.n2(x))))


class Model(nn.Module):
    def __init__(self, vocab, d=32, depth=2, context=16):
        super().__init__()
        self.embed, self.pos = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.layers = nn.ModuleList(Layer(d, 4) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.pos.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def sample(step, vocab, rows=8, context=16):
    """Token frequencies follow Zipf's law; every third token repeats the one before it."""
    g = torch.Generator().manual_seed(40 + step)
    freq = 1.0 / torch.arange(1, vocab + 1)
    ids = torch.multinomial(freq, rows * (context + 1), replacement=True, generator=g).view(rows, -1)
    ids[:, 2::3] = ids[:, 1::3][:, : ids[:, 2::3].shape[1]]
    return ids


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--lr", type=float, default=1.5e-2)
    ap.add_argument("--vocab", type=int, default=64)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    model = Model(a.vocab)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = Adafactor(model.parameters(), lr=a.lr)
    part = f"rank{rank}_{world}.pt"

    begin = 0
    if a.resume:
        begin = max(map(int, os.listdir(a.resume)))
        saved = torch.load(os.path.join(a.resume, str(begin), part))
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.to_local().copy_(saved["weights"][n])
                opt.state[p] = saved["factors"][n]

    for step in range(begin, a.steps):
        ids = sample(step, a.vocab)[rank::world]
        loss = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
        loss.backward()
        opt.step()
        opt.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % 4 == 0:
            print(f"{step + 1} {mean:.4f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0 and step + 1 < a.steps:
            folder = os.path.join(a.out, str(step + 1))
            os.makedirs(folder, exist_ok=True)
            named = dict(model.named_parameters())
            torch.save(
                {
                    "weights": {n: p.detach().to_local() for n, p in named.items()},
                    "factors": {n: opt.state[p] for n, p in named.items()},
                },
                os.path.join(folder, part),
            )
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
