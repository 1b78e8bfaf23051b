"""Audio-visual contrastive learning with a big batch by gradient caching (Gao et al. 2021).

Pass 1 embeds the chunks without a graph, the loss is differentiated with respect to the embeddings of the whole
global batch, and pass 2 sends these gradients through the towers chunk by chunk; only the last chunk communicates.
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Tower(nn.Module):
    def __init__(self, i, h=32, o=12):
        super().__init__()
        self.inp = nn.Linear(i, h)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(h), nn.Linear(h, h), nn.GELU()) for _ in range(2))
        self.out = nn.Linear(h, o)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = x + b(x)
        return F.normalize(self.out(x), dim=-1)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.audio, self.video = Tower(20), Tower(30)

    def forward(self, a, v):
        return torch.stack([self.audio(a), self.video(v)], 1)


def clips(n, seed):
    g = torch.Generator().manual_seed(seed)
    w = torch.Generator().manual_seed(71)
    pa, pv = torch.randn(6, 20, generator=w), torch.randn(6, 30, generator=w)
    scene = torch.randn(n, 6, generator=g)
    return scene @ pa + 0.3 * torch.randn(n, 20, generator=g), scene @ pv + 0.3 * torch.randn(n, 30, generator=g)


def everyone(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def nce(z, tau):
    sim = z[:, 0] @ z[:, 1].T / tau
    y = torch.arange(len(z))
    return 0.5 * (F.cross_entropy(sim, y) + F.cross_entropy(sim.T, y))


def train_step(model, a, v, chunk, tau, rank, world):
    pieces = list(zip(a.split(chunk), v.split(chunk)))
    with torch.no_grad():
        local = torch.cat([model(*p) for p in pieces])
    z = everyone(local).requires_grad_(True)
    loss = nce(z, tau)
    (dz,) = torch.autograd.grad(loss, z)
    mine = dz.chunk(world)[rank].split(chunk)

    for i, (p, d) in enumerate(zip(pieces, mine)):
        model.set_requires_gradient_sync(i == len(pieces) - 1)
        # the shards are averaged over the ranks, the wanted gradient is the sum over the whole batch
        (model(*p) * d).sum().mul(world).backward()
    return loss.detach()


@torch.no_grad()
def recall_at_1(model, a, v):
    z = model(a, v)
    return ((z[:, 0] @ z[:, 1].T).argmax(1) == torch.arange(len(a))).float().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=25)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--chunk", type=int, default=8)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(70)
    model = Pair()
    for tower in (model.audio, model.video):
        for b in tower.blocks:
            fully_shard(b)
        fully_shard(tower)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    a, v = clips(256, 1)
    ta, tv = clips(64, 2)

    for step in range(args.steps):
        ids = torch.randperm(len(a), generator=torch.Generator().manual_seed(step))[:args.batch].chunk(world)[rank]
        loss = train_step(model, a[ids], v[ids], args.chunk, 0.1, rank, world)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        opt.step()
        opt.zero_grad()
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    r = recall_at_1(model, ta, tv)
    if rank == 0:
        print(f"held-out recall@1 {r:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
