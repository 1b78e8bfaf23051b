import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from data import ShapesDataset, two_views
from lars import LARS
from model import SimCLR


class GatherEmbeddings(torch.autograd.Function):
    """all_gather whose backward returns to every rank the gradient of all ranks' losses."""

    @staticmethod
    def forward(ctx, z):
        ctx.rows = z.shape[0]
        parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.rows
        return grad[start:start + ctx.rows]


def nt_xent(za, zb, temperature):
    rank, n = dist.get_rank(), za.shape[0]
    all_a, all_b = GatherEmbeddings.apply(za), GatherEmbeddings.apply(zb)
    own = torch.arange(n) + rank * n
    total = all_a.shape[0]
    bank = torch.cat([all_a, all_b])
    loss = 0.0
    for z, self_idx, pos_idx in ((za, own, own + total), (zb, own + total, own)):
        logits = z @ bank.t() / temperature
        mask = torch.zeros_like(logits).scatter_(1, self_idx[:, None], 1.0).bool()
        loss = loss + F.cross_entropy(logits.masked_fill(mask, -1e9), pos_idx)
    return loss / 2


def newest(folder):
    steps = [int(m.group(1)) for m in (re.fullmatch(r"step_(\d+)", f) for f in os.listdir(folder)) if m]
    return os.path.join(folder, f"step_{max(steps)}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=32, help="images in the global batch")
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--warmup", type=int, default=3)
    ap.add_argument("--temperature", type=float, default=0.5)
    ap.add_argument("--seed", type=int, default=7)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default=None)
    ap.add_argument("--resume", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(args.seed)
    dataset = ShapesDataset(seed=args.seed)
    model = SimCLR()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = LARS(model.parameters(), lr=args.lr)

    step = 0
    if args.resume:
        path = newest(args.resume)
        model_sd, optim_sd = get_state_dict(model, optimizer)
        state = {"model": model_sd, "optim": optim_sd, "step": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]
        if rank == 0:
            print(f"resumed from {path}")

    per_epoch = len(dataset) // args.batch
    local = args.batch // world
    while step < args.steps:
        epoch, pos = divmod(step, per_epoch)
        perm = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(args.seed + epoch))
        idx = perm[pos * args.batch:(pos + 1) * args.batch][rank * local:(rank + 1) * local]
        view_a, view_b = two_views(dataset, idx, epoch, args.seed)

        scale = min(1.0, (step + 1) / args.warmup)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * scale
        z = model(torch.cat([view_a, view_b]))
        za, zb = z.chunk(2)
        loss = nt_xent(za, zb, args.temperature)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1

        log = loss.detach().clone()
        dist.all_reduce(log)
        if rank == 0:
            print(f"step {step:3d} loss {log.item() / world:.5f}")
        if args.save_every and args.out and step % args.save_every == 0:
            model_sd, optim_sd = get_state_dict(model, optimizer)
            dcp.save({"model": model_sd, "optim": optim_sd, "step": step},
                     checkpoint_id=os.path.join(args.out, f"step_{step}"))

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
