"""Two-tower retrieval with in-batch negatives taken from all ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

USERS, ITEMS, LATENT = 64, 96, 4


class Tower(nn.Module):
    def __init__(self, count, dim=16):
        super().__init__()
        self.table = nn.Embedding(count, dim)
        self.net = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))

    def forward(self, ids):
        e = self.table(ids)
        return F.normalize(e + self.net(e), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Tower(USERS), Tower(ITEMS)
        self.log_scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, user, item):
        return self.user(user), self.item(item), self.log_scale.exp()


def clicks():
    """For every user the items that lie nearest to it in a hidden space."""
    g = torch.Generator().manual_seed(77)
    u, v = torch.randn(USERS, LATENT, generator=g), torch.randn(ITEMS, LATENT, generator=g)
    top = (F.normalize(u, dim=1) @ F.normalize(v, dim=1).T).topk(6, dim=1).indices
    user = torch.arange(USERS).repeat_interleave(6)
    return user, top.flatten()


def everyones(items, ids):
    """Item vectors and ids of all ranks, in rank order."""
    vectors = [torch.empty_like(items) for _ in range(dist.get_world_size())]
    dist.all_gather(vectors, items)
    vectors[dist.get_rank()] = items
    all_ids = [torch.empty_like(ids) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ids, ids)
    return torch.cat(vectors), torch.cat(all_ids)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = TwoTower()
    fully_shard(model.user)
    fully_shard(model.item)
    fully_shard(model)
    optim = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)

    start = 0
    if args.resume:
        name = max(os.listdir(args.resume))
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, name))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    user_ids, item_ids = clicks()
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(6000 + step)
        pick = torch.randperm(len(user_ids), generator=g)[: args.batch].chunk(world)[rank]
        u, i, scale = model(user_ids[pick], item_ids[pick])
        bank, bank_ids = everyones(i, item_ids[pick])
        logits = scale * (u @ bank.T)
        target = rank * len(pick) + torch.arange(len(pick))
        # the same item drawn by another row is no negative
        twin = (item_ids[pick][:, None] == bank_ids[None]) & (torch.arange(len(bank_ids)) != target[:, None])
        loss = F.cross_entropy(logits.masked_fill(twin, -1e4), target)
        optim.zero_grad()
        loss.backward()
        optim.step()

        shown = torch.stack([loss.detach(), (logits.detach().argmax(1) == target).float().mean()])
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step:3d} loss {shown[0] / world:.4f} in-batch hit rate {shown[1] / world:.3f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save(
                {"model": m, "optim": o, "step": step + 1}, checkpoint_id=os.path.join(args.out, f"{step + 1:06d}")
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
