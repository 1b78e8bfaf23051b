import argparse
import os
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from rowwise import RowWiseAdagrad

TABLES = {"user": 97, "ad": 61, "site": 33}
DIM = 8


class HashedTables(nn.Module):
    """String ids hashed twice into each table (the sum of two rows)."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleDict({k: nn.EmbeddingBag(n, DIM, mode="sum") for k, n in TABLES.items()})
        for t in self.tables.values():
            nn.init.uniform_(t.weight, -0.05, 0.05)

    def forward(self, rows):
        return torch.stack([self.tables[k](rows[k]) for k in TABLES], dim=1)


class AdModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = HashedTables()
        n = len(TABLES)
        self.top = nn.Sequential(nn.Linear(n * DIM + n * (n - 1) // 2, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, rows):
        e = self.tables(rows)
        i, j = torch.triu_indices(e.shape[1], e.shape[1], offset=1)
        pairs = (e @ e.mT)[:, i, j]
        return self.top(torch.cat([e.flatten(1), pairs], dim=1))


def hashed(field, key):
    n = TABLES[field]
    return [zlib.crc32(f"{field}:{key}:{salt}".encode()) % n for salt in (0, 1)]


def make_log(rows=3000):
    g = torch.Generator().manual_seed(6)
    raw = {k: torch.randint(0, 3 * n, (rows,), generator=g) for k, n in TABLES.items()}
    bias = {k: torch.randn(3 * n, generator=g) for k, n in TABLES.items()}
    logit = sum(bias[k][raw[k]] for k in TABLES) - 0.5
    logit = logit + bias["user"][raw["user"]] * bias["ad"][raw["ad"]]
    clicks = (torch.rand(rows, generator=g) < torch.sigmoid(logit)).float()
    ids = {k: torch.tensor([hashed(k, v) for v in raw[k].tolist()]) for k in TABLES}
    return ids, clicks


def stream(ids, clicks, batch, position):
    """One pass over the log in time order, starting at a position; the whole batch on every rank."""
    while position + batch <= len(clicks):
        part = slice(position, position + batch)
        position += batch
        yield position, {k: v[part] for k, v in ids.items()}, clicks[part]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=60)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ads")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ids, clicks = make_log()

    torch.manual_seed(1)
    model = AdModel()
    fully_shard(model.tables)
    fully_shard(model)
    sparse = RowWiseAdagrad(model.tables.named_parameters(), lr=0.03)
    dense = torch.optim.AdamW(model.top.parameters(), lr=4e-3)
    warmup = torch.optim.lr_scheduler.LambdaLR(dense, lambda s: min(1.0, (s + 1) / 10))

    position, progressive, seen = 0, 0.0, 0
    if args.resume:
        newest = max(int(f.split(".")[0]) for f in os.listdir(args.resume))
        d = torch.load(os.path.join(args.resume, f"{newest}.rank{rank}"), weights_only=False)
        model.load_state_dict(d["model"])
        sparse.sums = d["row_sums"]
        dense.load_state_dict(d["dense"])
        warmup.load_state_dict(d["warmup"])
        position, progressive, seen = newest, d["progressive"], d["seen"]

    for position, rows, y in stream(ids, clicks, args.batch, position):
        mine = slice(rank * args.batch // world, (rank + 1) * args.batch // world)
        logits = model({k: v[mine] for k, v in rows.items()}).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, y[mine], reduction="sum") / args.batch
        dense.zero_grad()
        (loss * world).backward()  # the tables are updated in here
        dense.step()
        warmup.step()

        # progressive validation: the loss of a batch before it was learnt
        total = loss.detach().double()
        dist.all_reduce(total)
        progressive, seen = progressive + total.item(), seen + 1
        if rank == 0 and seen % 10 == 0:
            print(f"position {position} batch logloss {total.item():.4f} progressive {progressive / seen:.4f}")
        if args.save_every and seen % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save(
                {
                    "model": model.state_dict(),
                    "row_sums": sparse.sums,
                    "dense": dense.state_dict(),
                    "warmup": warmup.state_dict(),
                    "progressive": progressive,
                    "seen": seen,
                },
                os.path.join(args.out, f"{position}.rank{rank}"),
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
