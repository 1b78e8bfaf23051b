"""Tabular regression; the learning rate follows ReduceLROnPlateau on the validation error."""

import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def make_split():
    g = torch.Generator().manual_seed(21)
    x = torch.randn(768, 12, generator=g)
    y = torch.sin(x[:, :4]).sum(1) + 0.5 * x[:, 4] * x[:, 5] + 0.5 * torch.randn(768, generator=g)
    return (x[:640], y[:640]), (x[640:], y[640:])


def build():
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))
    for i in (0, 2):
        fully_shard(net[i])
    return fully_shard(net)


@torch.no_grad()
def validation_error(net, x, y, rank, world):
    net.eval()
    xs, ys = x[rank::world], y[rank::world]
    total = torch.zeros(2, dtype=torch.float64)
    for part in range(0, len(xs), 64):
        err = net(xs[part : part + 64]).squeeze(-1) - ys[part : part + 64]
        total[0] += err.pow(2).sum()
        total[1] += len(err)
    net.train()
    return (total[0] / total[1]).item()


class Checkpointer:
    def __init__(self, net, optim, plateau):
        self.net, self.optim, self.plateau = net, optim, plateau

    def state(self):
        m, o = get_state_dict(self.net, self.optim)
        return {"net": m, "optim": o, "plateau": self.plateau.state_dict(), "step": 0}

    def save(self, folder, step):
        state = self.state()
        state["step"] = step
        dcp.save(state, checkpoint_id=os.path.join(folder, f"ckpt{step}"))

    def load(self, folder):
        newest = max((d for d in os.listdir(folder) if re.fullmatch(r"ckpt\d+", d)), key=lambda d: int(d[4:]))
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, newest))
        set_state_dict(self.net, self.optim, model_state_dict=state["net"], optim_state_dict=state["optim"])
        self.plateau.load_state_dict(state["plateau"])
        return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.015)
    ap.add_argument("--eval-every", type=int, default=2)
    ap.add_argument("--out", default="")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    (x, y), (vx, vy) = make_split()
    net = build()
    optim = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=1e-3, eps=1e-6)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optim, factor=0.5, patience=1, threshold=0.01)
    checkpointer = Checkpointer(net, optim, plateau)
    step = checkpointer.load(args.resume) if args.resume else 0

    while step < args.steps:
        g = torch.Generator().manual_seed(900 + step)
        pick = torch.randperm(len(x), generator=g)[: args.batch][rank::world]
        loss = (net(x[pick]).squeeze(-1) - y[pick]).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optim.step()
        optim.zero_grad()
        step += 1

        if step % args.eval_every == 0:
            error = validation_error(net, vx, vy, rank, world)
            plateau.step(error)
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(
                    f"step {step:3d} train {shown / world:.4f} valid {error:.4f} lr {optim.param_groups[0]['lr']:.5f}",
                    flush=True,
                )
        if args.out and args.save_every and step % args.save_every == 0:
            checkpointer.save(args.out, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
