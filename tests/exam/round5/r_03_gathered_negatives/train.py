"""Two-tower retrieval model with in-batch negatives taken from the whole global batch."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard

USERS, ITEMS, DIM = 64, 40, 16


class Tower(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.ids = nn.Embedding(count, DIM)
        self.body = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, DIM))

    def forward(self, i):
        return F.normalize(self.body(self.ids(i)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Tower(USERS), Tower(ITEMS)
        self.log_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, users, items):
        return self.user(users), self.item(items), self.log_scale.exp()


def make_log(n=2048, seed=1):
    """Users of a taste group click items of that group."""
    g = torch.Generator().manual_seed(seed)
    users = torch.randint(0, USERS, (n,), generator=g)
    items = (users % 8) * (ITEMS // 8) + torch.randint(0, ITEMS // 8, (n,), generator=g)
    return users, items


def gather_items(x):
    """[local, dim] -> [global, dim]"""
    return torch.cat(dist_fn.all_gather(x))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--global-batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = TwoTower()
    fully_shard(model.user)
    fully_shard(model.item)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    users, items = make_log()
    local = args.global_batch // world
    per_epoch = len(users) // args.global_batch
    step = 0
    if args.resume:
        newest = max((d for d in os.listdir(args.resume) if d.isdigit()), key=int)
        msd, osd = get_state_dict(model, opt)
        state = {"m": msd, "o": osd, "step": step}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, opt, model_state_dict=state["m"], optim_state_dict=state["o"])
        step = state["step"]

    while step < args.steps:
        order = torch.randperm(len(users), generator=torch.Generator().manual_seed(step // per_epoch))
        lo = (step % per_epoch) * args.global_batch + rank * local
        pick = order[lo:lo + local]

        u, v, scale = model(users[pick], items[pick])
        candidates = gather_items(v)
        target = torch.arange(local) + rank * local
        loss = F.cross_entropy(scale * u @ candidates.T, target)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        step += 1

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and args.out and step % args.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save({"m": msd, "o": osd, "step": step}, checkpoint_id=os.path.join(args.out, str(step).zfill(6)))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
