"""Detector head with a guard: after a spike of the loss the run returns to an in-memory snapshot and halves the rate."""

import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class Snapshot:
    """Copies of the local shards and of the optimizer state; every rank keeps its own part."""

    def __init__(self, model, opt, position):
        self.params = [p.to_local().detach().clone() for p in model.parameters()]
        self.state = {p: {k: v.clone() for k, v in s.items()} for p, s in opt.state.items()}
        self.position = position

    @torch.no_grad()
    def restore(self, model, opt):
        for p, saved in zip(model.parameters(), self.params):
            p.to_local().copy_(saved)
        opt.state.clear()
        for p, s in self.state.items():
            opt.state[p] = {k: v.clone() for k, v in s.items()}


def targets(n=512):
    g = torch.Generator().manual_seed(14)
    x = torch.randn(n, 24, generator=g)
    box = torch.sigmoid(x @ torch.randn(24, 4, generator=g) / 3)
    valid = (torch.rand(n, generator=g) < 0.4).float()  # only some pictures carry a box
    return x, box, valid


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=0.02)
    p.add_argument("--bad-batch", type=int, default=11, help="data index at which a corrupt batch comes")
    p.add_argument("--export", default="")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    fully_shard(model[2])
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=a.lr)
    X, B, V = targets()
    done, cursor, average, snap, skip = 0, 0, None, None, set()
    while done < a.steps:
        if cursor in skip:
            cursor += 1
            continue
        if done % 4 == 0 and (snap is None or snap.position[0] != done):
            snap = Snapshot(model, opt, (done, cursor, average))
        idx = torch.randint(0, len(X), (a.batch,), generator=torch.Generator().manual_seed(cursor))
        n = V[idx].sum().clamp(min=1)  # boxes of the global batch: the index is the same on all ranks
        idx = idx.chunk(world)[rank]
        x = X[idx] * (40.0 if cursor == a.bad_batch else 1.0)
        per = F.smooth_l1_loss(model(x), B[idx], reduction="none").sum(1)
        loss = (per * V[idx]).sum() * world / n
        opt.zero_grad()
        loss.backward()
        opt.step()
        value = loss.detach() / world
        dist.all_reduce(value)
        value = value.item()
        if average is not None and value > 5 * average:
            if rank == 0:
                print(f"spike {value:.3f} at batch {cursor}: back to step {snap.position[0]}", flush=True)
            skip.add(cursor)
            snap.restore(model, opt)
            done, cursor, average = copy.copy(snap.position)
            for g in opt.param_groups:
                g["lr"] *= 0.5
            continue
        average = value if average is None else 0.8 * average + 0.2 * value
        if rank == 0 and done % 5 == 0:
            print(f"step {done} loss {value:.5f} lr {opt.param_groups[0]['lr']}", flush=True)
        done, cursor = done + 1, cursor + 1
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and a.export:
        torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
