"""Contrastive training with a gradient cache: embed all chunks without a graph, take the loss gradient with respect to the
embeddings, then replay chunk by chunk with a graph and push the cached gradient through."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard

FEATS, DIM = 24, 16


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATS, 48), nn.LayerNorm(48), nn.GELU())
        self.second = nn.Sequential(nn.Linear(48, 48), nn.GELU())
        self.out = nn.Linear(48, DIM)

    def forward(self, x):
        return F.normalize(self.out(self.second(self.first(x))), dim=-1)


class Gather(torch.autograd.Function):
    """All ranks' rows; backward gives every rank the sum of what all ranks want for its rows."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def views(step, size, rank, world):
    """Two noisy linear views of the same latent point."""
    g = torch.Generator().manual_seed(99)
    a, b = torch.randn(6, FEATS, generator=g), torch.randn(6, FEATS, generator=g)
    g = torch.Generator().manual_seed(50_000 + step)
    z = torch.randn(size, 6, generator=g)
    x = z @ a + 0.3 * torch.randn(size, FEATS, generator=g)
    y = z @ b + 0.3 * torch.randn(size, FEATS, generator=g)
    return x.chunk(world)[rank], y.chunk(world)[rank]


def info_nce(x, y, temperature):
    local, rank = len(x), dist.get_rank()
    target = torch.arange(local) + rank * local
    all_x, all_y = Gather.apply(x), Gather.apply(y)
    return 0.5 * (F.cross_entropy(x @ all_y.T / temperature, target) + F.cross_entropy(y @ all_x.T / temperature, target))


def cached_step(left, right, x, y, chunk, temperature):
    xs, ys = x.split(chunk), y.split(chunk)
    with torch.no_grad():
        ex, ey = torch.cat([left(c) for c in xs]), torch.cat([right(c) for c in ys])
    ex.requires_grad_(), ey.requires_grad_()
    loss = info_nce(ex, ey, temperature)
    gx, gy = torch.autograd.grad(loss, [ex, ey])
    for model, chunks, grads in ((left, xs, gx), (right, ys, gy)):
        for i, (c, g) in enumerate(zip(chunks, grads.split(chunk))):
            model.set_requires_gradient_sync(i == len(chunks) - 1)
            (model(c) * g).sum().backward()
    return loss.detach()


def sharded(seed):
    torch.manual_seed(seed)
    m = Encoder()
    fully_shard(m.first)
    fully_shard(m.second)
    return fully_shard(m)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--global-batch", type=int, default=64)
    p.add_argument("--chunk", type=int, default=8)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    towers = nn.ModuleDict({"left": sharded(1), "right": sharded(2)})
    opt = torch.optim.AdamW(towers.parameters(), lr=1e-2)

    def tree(step):
        m, o = get_state_dict(towers, opt)
        return {"towers": m, "opt": o, "step": step}

    step = 0
    if args.resume:
        state = tree(0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(towers, opt, model_state_dict=state["towers"], optim_state_dict=state["opt"])
        step = state["step"]

    for step in range(step + 1, args.steps + 1):
        x, y = views(step, args.global_batch, rank, world)
        loss = cached_step(towers["left"], towers["right"], x, y, args.chunk, 0.2)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step} loss {loss.item() / world:.4f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            dcp.save(tree(step), checkpoint_id=os.path.join(args.out, f"{step:06d}"))

    if args.export:
        full = get_model_state_dict(towers, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
