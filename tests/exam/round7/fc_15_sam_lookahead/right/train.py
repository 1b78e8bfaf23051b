"""Two-tower recommender trained with BPR, SAM and Lookahead; the item bias is small and stays outside of the sharding."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from data import ITEMS, USERS, Clicks
from sam import SamLookahead


class Tower(nn.Module):
    def __init__(self, count, dim=16):
        super().__init__()
        self.table = nn.Embedding(count, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        nn.init.normal_(self.table.weight, std=0.3)

    def forward(self, ids):
        e = self.table(ids)
        return e + self.mlp(e)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.users, self.items = Tower(USERS), Tower(ITEMS)
        self.bias = nn.Parameter(torch.zeros(ITEMS))

    def forward(self, user, pos, neg):
        u = self.users(user)
        p, n = self.items(torch.cat([pos, neg])).chunk(2)
        return (u * (p - n)).sum(-1) + self.bias[pos] - self.bias[neg]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(44)
    model = Recommender()
    for t in (model.users, model.items):
        fully_shard(t)
    fully_shard(model, ignored_params={model.bias})
    params = list(model.parameters())
    base = torch.optim.SGD(params, lr=0.5, momentum=0.8)
    for p in params:
        base.state[p]["momentum_buffer"] = torch.zeros_like(p)
    sam = SamLookahead(params, base)
    names = [n for n, _ in model.named_parameters()]
    data = Clicks()

    def tensors():
        return {"weights": {n: p.detach() for n, p in zip(names, params)},
                "momentum": {n: base.state[p]["momentum_buffer"] for n, p in zip(names, params)},
                "slow": dict(zip(names, sam.slow))}

    epoch, done = 0, 0
    if args.resume:
        last = max(os.listdir(args.resume), key=lambda d: int(d[1:]))
        st = tensors() | {"pos": torch.zeros(3, dtype=torch.long)}
        dcp.load(st, checkpoint_id=os.path.join(args.resume, last))       # in place
        epoch, done, sam.count = st["pos"].tolist()

    def loss_and_grad(batch):
        loss = -F.logsigmoid(model(*batch)).mean()
        loss.backward()
        if model.bias.grad is not None:      # not managed by FSDP: average it over the ranks here
            dist.all_reduce(model.bias.grad)
            model.bias.grad /= world
        return loss.detach()

    while epoch < args.epochs:
        total = torch.zeros(2)
        for i, *batch in data.loader(epoch, args.batch, rank, world, skip=done):
            loss = loss_and_grad(batch)
            sam.ascend()
            loss_and_grad(batch)
            sam.descend()
            total += torch.tensor([loss.item(), 1.0])
            if args.save_every and sam.count % args.save_every == 0:
                st = tensors() | {"pos": torch.tensor([epoch, i + 1, sam.count])}
                dcp.save(st, checkpoint_id=os.path.join(args.out, f"u{sam.count}"))
        dist.all_reduce(total)
        if rank == 0 and total[1] > 0:
            print(f"epoch {epoch} update {sam.count} bpr {total[0] / total[1]:.6f} (mean of {int(total[1]) // world} updates)", flush=True)
        epoch, done = epoch + 1, 0

    if args.export:
        full = {k: {n: (t.full_tensor() if isinstance(t, DTensor) else t) for n, t in part.items()} for k, part in tensors().items() if k != "momentum"}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
