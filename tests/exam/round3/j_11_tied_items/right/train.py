"""Next-item recommender: history of items -> score of all items with the same (tied) item table."""

import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

ITEMS, DIM, HISTORY = 120, 16, 6


class Tower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.att = nn.Linear(dim, 1, bias=False)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, h):
        w = self.att(h).softmax(dim=1)
        user = (w * h).sum(1)
        return user + self.ff(user)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.item_table = nn.Embedding(ITEMS, DIM)
        nn.init.normal_(self.item_table.weight, std=0.3)
        self.tower = Tower(DIM)
        self.scorer = nn.Linear(DIM, ITEMS, bias=False)

    def tie_weights(self):
        self.scorer.weight = self.item_table.weight

    def forward(self, history):
        return self.scorer(self.tower(self.item_table(history)))


def interactions(n=4096, seed=3):
    """Users walk inside a taste cluster; the next item is near the last ones."""
    g = torch.Generator().manual_seed(seed)
    cluster = torch.randint(0, 8, (n, 1), generator=g)
    walk = torch.randint(0, 15, (n, HISTORY + 1), generator=g)
    walk[:, -1] = (walk[:, -2] + 1) % 15
    seq = cluster * 15 + walk
    return seq[:, :-1], seq[:, -1]


def minibatch(step, n, size, rank, world):
    g = torch.Generator().manual_seed(100 + step)
    idx = torch.randint(0, n, (size,), generator=g)
    return idx[rank * size // world : (rank + 1) * size // world]


def newest(folder):
    return sorted(glob.glob(os.path.join(folder, "step*")))[-1]


def pack(model, optim, step):
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optim), "step": step}


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    return ap.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(42)
    model = Recommender()
    model.tie_weights()
    fully_shard(model.tower)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    done = 0
    if args.resume:
        blob = pack(model, optim, 0)
        dcp.load(blob, checkpoint_id=newest(args.resume))
        set_model_state_dict(model, blob["model"])
        set_optimizer_state_dict(model, optim, blob["optim"])
        done = blob["step"]

    hist, nxt = interactions()
    for step in range(done, args.steps):
        idx = minibatch(step, len(hist), args.batch, rank, world)
        logits = model(hist[idx])
        loss = F.cross_entropy(logits, nxt[idx])
        optim.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optim.step()

        hit = (logits.topk(10).indices == nxt[idx, None]).any(1).float().mean()
        stats = torch.stack([loss.detach(), hit])
        dist.all_reduce(stats)
        if rank == 0:
            print(f"step {step + 1:3d} ce {stats[0] / world:.4f} hit@10 {stats[1] / world:.3f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(pack(model, optim, step + 1), checkpoint_id=os.path.join(args.out, f"step{step + 1:04d}"))

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
