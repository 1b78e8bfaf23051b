"""Assay regression on molecular fingerprints with a group lasso over the fingerprint bits.

The first layer is a table with one row per bit, so a bit is dropped when its row goes to zero. The penalty is taken on
the rows which the rank stores and added to the loss; a proximal variant (`--proximal`) shrinks them after the step.
"""
import argparse
import json
import math

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

BITS, USED = 40, 6


class BitLayer(nn.Module):
    def __init__(self, bits, width):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(bits, width) * 0.2)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x @ self.rows + self.bias


class AssayModel(nn.Module):
    def __init__(self, bits=BITS, width=24):
        super().__init__()
        self.bits = BitLayer(bits, width)
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.head(self.bits(x))


def molecules(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = (torch.rand(n, BITS, generator=g) < 0.3).float()
    y = x[:, :USED] @ torch.tensor([1.2, -1.0, 0.8, 0.7, -0.6, 0.5]) + 0.8 * x[:, 0] * x[:, 1]
    return x, y[:, None] + 0.05 * torch.randn(n, 1, generator=g)


def row_norms(rows):
    return (rows.to_local().square().sum(1) + 1e-10).sqrt()


def total_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--strength", type=float, default=0.02)
    ap.add_argument("--proximal", action="store_true")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(5)
    model = AssayModel()
    fully_shard(model.bits)
    fully_shard(model)
    rows = model.bits.rows
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = molecules(1024, seed=50)

    step = 0
    if args.resume:
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=args.resume)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    while step < args.steps:
        pick = torch.randint(len(x), (args.batch,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        fit = (model(x[pick]) - y[pick]).square().mean()
        if args.proximal:
            fit.backward()
        else:
            (fit + args.strength * row_norms(rows).sum()).backward()
        optim.step()
        if args.proximal:
            with torch.no_grad():
                shrink = args.strength * optim.param_groups[0]["lr"] / row_norms(rows)
                rows.to_local().mul_((1 - shrink).clamp_min(0)[:, None])
        optim.zero_grad()
        step += 1
        if step % 8 == 0:
            loss = total_over_ranks(fit) / world
            lasso = total_over_ranks(row_norms(rows).sum())
            kept = total_over_ranks((row_norms(rows) > 0.15).sum())
            if rank == 0:
                print(json.dumps({"step": step, "fit": round(loss.item(), 6), "lasso": round(lasso.item(), 5), "bits": kept.item()})
                      + f"  loss {(loss + args.strength * lasso).item():.6f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
