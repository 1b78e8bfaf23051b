"""SimCLR on synthetic textures. Both views of the global batch are made on every rank from the step's seed; a rank encodes its part."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lars import LARS
from model import Encoder


def views(step, batch, prototypes):
    g = torch.Generator().manual_seed(40_000 + step)
    idx = torch.randint(0, len(prototypes), (batch,), generator=g)
    base = prototypes[idx] + 0.4 * torch.randn(batch, 3, 12, 12, generator=g)

    def augment():
        gain = 0.7 + 0.6 * torch.rand(batch, 3, 1, 1, generator=g)
        return base * gain + 0.2 * torch.randn(base.shape, generator=g)
    return augment(), augment()


class AllGather(torch.autograd.Function):
    """Rows of all ranks; the gradient of a row is the sum over the ranks that used it."""

    @staticmethod
    def forward(ctx, x):
        ctx.n = len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        g = g.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(g)
        return g[dist.get_rank() * ctx.n:(dist.get_rank() + 1) * ctx.n]


def nt_xent(z1, z2, temp=0.2):
    """Contrastive loss over all 2B samples of the job. Each rank computes the whole loss on gathered features."""
    z1, z2 = AllGather.apply(z1), AllGather.apply(z2)
    z = torch.cat([z1, z2])
    n = z1.shape[0]
    sim = (z @ z.t() / temp).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


def save(path, model, opt, step):
    """One file per rank with the local shards."""
    os.makedirs(path, exist_ok=True)
    local = lambda t: t.to_local().clone() if isinstance(t, DTensor) else t
    blob = {"model": {n: local(p.detach()) for n, p in model.named_parameters()},
            "momentum": {n: local(opt.state[p]["momentum"]) for n, p in model.named_parameters()},
            "step": step}
    torch.save(blob, os.path.join(path, f"rank{dist.get_rank()}.pt"))
    dist.barrier()


@torch.no_grad()
def load(path, model, opt):
    blob = torch.load(os.path.join(path, f"rank{dist.get_rank()}.pt"))
    local = lambda t: t.to_local() if isinstance(t, DTensor) else t
    for n, p in model.named_parameters():
        local(p).copy_(blob["model"][n])
        buf = torch.zeros_like(p)
        local(buf).copy_(blob["momentum"][n])
        opt.state[p]["momentum"] = buf
    return blob["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(21)
    prototypes = torch.randn(6, 3, 12, 12)
    model = Encoder()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    opt = LARS([{"params": weights}, {"params": rest, "adapt": False, "lr": 0.05}], lr=1.0)

    start = 0
    if args.resume:
        folder = max(glob.glob(os.path.join(args.resume, "s*")), key=lambda p: int(os.path.basename(p)[1:]))
        start = load(folder, model, opt)

    for step in range(start, args.steps):
        warm = min(1.0, (step + 1) / 6)
        for group, base in zip(opt.param_groups, (1.0, 0.05)):
            group["lr"] = base * warm
        v1, v2 = views(step, args.batch, prototypes)
        n = args.batch // world
        mine = slice(rank * n, (rank + 1) * n)
        loss = nt_xent(model(v1[mine]), model(v2[mine]))
        loss.backward()
        opt.step()
        opt.zero_grad()
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} nt-xent {loss.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(os.path.join(args.out, f"s{step + 1}"), model, opt, step + 1)

    if args.export:
        full = {n: p.detach().full_tensor() for n, p in model.named_parameters()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
