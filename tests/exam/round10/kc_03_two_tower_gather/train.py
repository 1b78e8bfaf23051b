#!/usr/bin/env python
"""Two-tower retrieval, in-batch sampled softmax over the items of all ranks, FSDP2."""
import argparse
import glob
import os
import re

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

N_USERS, N_ITEMS, DIM = 400, 256, 24


class GatherRows(torch.autograd.Function):
    """Concatenate the rows of all ranks, differentiable."""

    @staticmethod
    def forward(ctx, rows):
        ctx.n = rows.shape[0]
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        begin = dist.get_rank() * ctx.n
        return grad[begin : begin + ctx.n]


class Tower(nn.Module):
    def __init__(self, n_ids, n_features):
        super().__init__()
        self.ids = nn.Embedding(n_ids, DIM)
        self.features = nn.Linear(n_features, DIM)
        self.mix = nn.Sequential(nn.Linear(2 * DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, ids, features):
        h = torch.cat([self.ids(ids), self.features(features)], dim=-1)
        return F.normalize(self.mix(h), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = Tower(N_USERS, 6)
        self.item = Tower(N_ITEMS, 6)
        self.log_scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, users, user_x, items, item_x):
        return self.user(users, user_x), self.item(items, item_x), self.log_scale.exp()


def make_clicks(seed=1):
    g = torch.Generator().manual_seed(seed)
    user_x = torch.randn(N_USERS, 6, generator=g)
    item_x = torch.randn(N_ITEMS, 6, generator=g)
    rot = torch.linalg.qr(torch.randn(6, 6, generator=g))[0]
    affinity = user_x @ rot @ item_x.T + 0.5 * torch.randn(N_USERS, N_ITEMS, generator=g)
    clicks = torch.multinomial(torch.softmax(affinity, 1), 12, generator=g)
    return user_x, item_x, clicks[:, :10], clicks[:, 10:]


@torch.no_grad()
def recall_at_10(model, user_x, item_x, held_out):
    everyone = torch.arange(N_USERS)
    u, v, _ = model(everyone, user_x, torch.arange(N_ITEMS), item_x)
    top = (u @ v.T).topk(10, dim=1).indices
    hit = (top.unsqueeze(2) == held_out.unsqueeze(1)).any(1).float()
    return hit.mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="towers")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    user_x, item_x, clicks, held_out = make_clicks()

    torch.manual_seed(0)
    model = TwoTower()
    for tower in (model.user, model.item):
        fully_shard(tower)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.steps)

    start = 0
    if args.resume:
        files = glob.glob(os.path.join(args.resume, f"step*_rank{rank}of{world}.pt"))
        newest = max(files, key=lambda f: int(re.search(r"step(\d+)_", f).group(1)))
        saved = torch.load(newest, weights_only=False)
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        sched.load_state_dict(saved["sched"])
        start = saved["step"]

    n = args.batch // world
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(9000 + step)
        users = torch.randint(0, N_USERS, (args.batch,), generator=g)
        items = clicks[users, torch.randint(0, clicks.shape[1], (args.batch,), generator=g)]
        mine = slice(rank * n, (rank + 1) * n)

        u, v, scale = model(users[mine], user_x[users[mine]], items[mine], item_x[items[mine]])
        logits = scale * (u @ GatherRows.apply(v).T)
        # other occurrences of the clicked item are no negatives
        same = items[mine].unsqueeze(1) == items.unsqueeze(0)
        target = torch.arange(mine.start, mine.stop)
        same[torch.arange(n), target] = False
        loss = F.cross_entropy(logits.masked_fill(same, -1e4), target)

        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()

        if step % 10 == 0 or step == args.steps - 1:
            total = loss.detach() / world
            dist.all_reduce(total)
            if rank == 0:
                print("step", step, "loss", round(total.item(), 4), flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save(
                {"model": model.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "step": step + 1},
                os.path.join(args.out, f"step{step + 1}_rank{rank}of{world}.pt"),
            )

    recall = recall_at_10(model, user_x, item_x, held_out)
    if rank == 0:
        print("recall@10", round(recall, 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
