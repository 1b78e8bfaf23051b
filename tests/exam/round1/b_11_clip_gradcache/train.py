"""Contrastive training with a large batch through cached embedding gradients (GradCache).

1. embed all local chunks without a graph, 2. differentiate the global loss with respect to the
embeddings only, 3. run every chunk again with a graph and feed it the cached gradient.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Encoder(nn.Module):
    def __init__(self, d_in, w=40, d=16):
        super().__init__()
        self.inp = nn.Linear(d_in, w)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(w), nn.Linear(w, w), nn.SiLU()) for _ in range(3))
        self.out = nn.Linear(w, d)

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = h + b(h)
        return F.normalize(self.out(h), dim=-1)


def build(d_in):
    net = Encoder(d_in)
    for b in net.blocks:
        fully_shard(b)
    return fully_shard(net)


def global_loss(za, zb, rank, tau=0.1):
    """Mean over the local rows; the mean over the ranks is the loss of the global batch."""
    all_a, all_b = torch.cat(dist_fn.all_gather(za)), torch.cat(dist_fn.all_gather(zb))
    y = torch.arange(len(za)) + rank * len(za)
    return 0.5 * (F.cross_entropy(za @ all_b.T / tau, y) + F.cross_entropy(zb @ all_a.T / tau, y))


def data(n, seed):
    g, wg = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(404)
    z = torch.randn(n, 8, generator=g)
    a = (z @ torch.randn(8, 30, generator=wg)).tanh() + 0.2 * torch.randn(n, 30, generator=g)
    b = (z @ torch.randn(8, 24, generator=wg)).relu() + 0.2 * torch.randn(n, 24, generator=g)
    return a, b


def cached_step(encoders, inputs, chunk, rank):
    with torch.no_grad():
        leaves = [torch.cat([enc(c) for c in x.split(chunk)]) for enc, x in zip(encoders, inputs)]
    for z in leaves:
        z.requires_grad_(True)
    loss = global_loss(*leaves, rank)
    loss.backward()  # fills leaf.grad only, no parameter is touched
    for enc, x, z in zip(encoders, inputs, leaves):
        pieces = list(zip(x.split(chunk), z.grad.split(chunk)))
        for k, (xc, gc) in enumerate(pieces):
            last = k == len(pieces) - 1
            enc.set_requires_gradient_sync(last)
            enc.set_is_last_backward(last)
            (enc(xc) * gc).sum().backward()
    return loss.detach()


@torch.no_grad()
def recall_at_1(encoders, a, b, rank, world):
    za, zb = (enc(x.chunk(world)[rank]) for enc, x in zip(encoders, (a, b)))
    full = torch.cat([torch.empty_like(zb) for _ in range(world)])
    dist.all_gather_into_tensor(full, zb)
    hit = ((za @ full.T).argmax(1) == torch.arange(len(za)) + rank * len(za)).sum().float()
    dist.all_reduce(hit)
    return hit.item() / len(full)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--chunk", type=int, default=8)
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    encoders = [build(30), build(24)]
    params = [p for e in encoders for p in e.parameters()]
    opt = torch.optim.AdamW(params, lr=3e-3)
    a, b = data(2048, 1)
    va, vb = data(128, 2)
    for step in range(1, args.steps + 1):
        idx = torch.randperm(2048, generator=torch.Generator().manual_seed(step))[: args.batch].chunk(world)[rank]
        opt.zero_grad()
        loss = cached_step(encoders, (a[idx], b[idx]), args.chunk, rank)
        torch.nn.utils.clip_grad_norm_(params, 5.0)
        opt.step()
        dist.all_reduce(loss)
        if step % 4 == 0:
            r1 = recall_at_1(encoders, va, vb, rank, world)
            if rank == 0:
                print(f"step {step} loss {loss.item() / world:.4f} R@1 {r1:.3f}", flush=True)
    if args.export:
        full = {f"{i}.{k}": v.full_tensor() for i, e in enumerate(encoders) for k, v in e.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
