"""Lookahead: fast weights run k steps, slow weights follow; evaluation and export use the slow ones."""
import argparse
import contextlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class Lookahead:
    def __init__(self, inner, k=4, alpha=0.5):
        self.inner, self.k, self.alpha, self.count = inner, k, alpha, 0
        self.fast = [p for g in inner.param_groups for p in g["params"]]
        self.slow = [p.detach().clone() for p in self.fast]

    @torch.no_grad()
    def step(self):
        self.inner.step()
        self.count += 1
        if self.count % self.k == 0:
            for p, s in zip(self.fast, self.slow):
                s.lerp_(p, self.alpha)
                p.copy_(s)

    @contextlib.contextmanager
    def slow_weights(self):
        kept = [p.detach().clone() for p in self.fast]
        with torch.no_grad():
            for p, s in zip(self.fast, self.slow):
                p.copy_(s)
        try:
            yield
        finally:
            with torch.no_grad():
                for p, k in zip(self.fast, kept):
                    p.copy_(k)


class PairNet(nn.Module):
    """Siamese: are two noisy strings the same word?"""

    def __init__(self, d=10, width=24):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, width), nn.Tanh(), nn.Linear(width, width))
        self.join = nn.Linear(3 * width, 1)

    def forward(self, a, b):
        u, v = self.enc(torch.cat([a, b])).chunk(2)
        return self.join(torch.cat([u * v, (u - v).abs(), u + v], -1)).squeeze(-1)


def pairs(seed, n):
    words = torch.randn(12, 10, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(seed)
    i, j = torch.randint(12, (2, n), generator=g)
    j = torch.where(torch.rand(n, generator=g) < 0.5, i, j)
    return (words[i] + 0.2 * torch.randn(n, 10, generator=g), words[j] + 0.2 * torch.randn(n, 10, generator=g),
            (i == j).float())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = PairNet()
    fully_shard(model.enc)
    fully_shard(model)
    opt = Lookahead(torch.optim.AdamW(model.parameters(), lr=1.5e-2, eps=1e-6))

    for step in range(1, args.steps + 1):
        a, b, y = (t[rank::world] for t in pairs(step, args.batch))
        loss = F.binary_cross_entropy_with_logits(model(a, b), y)
        loss.backward()
        opt.step()
        opt.inner.zero_grad()
        m = loss.detach().clone()
        dist.all_reduce(m)
        text = f"step {step} loss {m.item() / world:.4f}"
        if step % 4 == 2:  # in the middle of a cycle
            with opt.slow_weights(), torch.no_grad():
                va, vb, vy = (t[rank::world] for t in pairs(-1, 128))
                hit = ((model(va, vb) > 0) == (vy > 0.5)).sum()
                dist.all_reduce(hit)
            text += f" slow acc {hit.item() / 128:.3f}"
        if rank == 0:
            print(text, flush=True)

    with opt.slow_weights():
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0 and args.export:
            torch.save(sd, args.export)  # inside: on one rank the tensors may still be the live ones
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
