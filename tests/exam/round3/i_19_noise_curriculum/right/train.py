"""Curriculum in two senses: sequences get longer and the batch gets larger while the micro batch stays the same;
annealed gradient noise is drawn for the whole parameter, so that it is the same on any number of ranks."""

import argparse
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

VOCAB, IGNORE, MICRO = 18, -100, 16


@dataclass(frozen=True)
class Stage:
    first: int
    length: int
    micro_batches: int


STAGES = (Stage(0, 6, 1), Stage(8, 9, 2), Stage(16, 12, 3))


def stage_at(step):
    return [s for s in STAGES if s.first <= step][-1]


def counting(step, stage):
    """x[t+1] = x[t] + d, with d per sequence; sequences have different true lengths."""
    g = torch.Generator().manual_seed(70_000 + step)
    n = MICRO * stage.micro_batches
    start, d = torch.randint(0, VOCAB, (n, 1), generator=g), torch.randint(1, 5, (n, 1), generator=g)
    seq = (start + d * torch.arange(stage.length + 1)) % VOCAB
    true_len = torch.randint(3, stage.length + 1, (n, 1), generator=g)
    target = seq[:, 1:].masked_fill(torch.arange(stage.length) >= true_len, IGNORE)
    target[:, 0] = IGNORE
    return seq[:, :-1], target


class Net(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.convs = nn.ModuleList(nn.Conv1d(dim, dim, 2) for _ in range(3))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.emb(ids).transpose(1, 2)
        for i, c in enumerate(self.convs):
            x = x + F.gelu(c(F.pad(x, (1, 0))))
        return self.head(x.transpose(1, 2))


@torch.no_grad()
def add_noise(model, step, eta=2e-3, gamma=0.55):
    std = (eta / (1 + step) ** gamma) ** 0.5 * 0.02
    for i, p in enumerate(model.parameters()):
        g = torch.Generator().manual_seed(1_000_003 * step + i)
        noise = torch.randn(p.shape, generator=g) * std
        p.grad.add_(distribute_tensor(noise, p.device_mesh, p.placements, src_data_rank=None))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(55)
    model = Net()
    for c in model.convs:
        fully_shard(c, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr)

    step = 0
    if args.resume:
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    while step < args.steps:
        stage = stage_at(step)
        ids, target = counting(step, stage)
        tokens = (target != IGNORE).sum()
        total = torch.zeros(())
        for k, (mi, mt) in enumerate(zip(ids.split(MICRO), target.split(MICRO)), 1):
            model.set_requires_gradient_sync(k == stage.micro_batches)
            mi, mt = mi[rank::world], mt[rank::world]
            loss = F.cross_entropy(model(mi).flatten(0, 1), mt.flatten(), ignore_index=IGNORE, reduction="sum") / tokens
            (loss * world).backward()
            total += loss.detach()
        add_noise(model, step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()
        step += 1
        dist.all_reduce(total)
        if rank == 0 and step % 4 == 0:
            print(f"step {step:3d} length {stage.length:2d} batch {len(ids):3d} loss {total.item():.4f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": step}, checkpoint_id=os.path.join(args.out, f"{step:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
