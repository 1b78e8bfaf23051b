"""Next-item recommender: a modulo-sharded item table beside a dense FSDP2 tower."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from table import ModuloTable

ITEMS, DIM, HISTORY, BATCH = 120, 16, 6, 64


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(DIM, 32, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, DIM))

    def forward(self, h):
        return self.mlp(self.gru(h)[1][0])


def sessions(g):
    start = torch.randint(ITEMS, (BATCH, 1), generator=g)
    hop = torch.randint(1, 4, (BATCH, HISTORY), generator=g).cumsum(1)
    seq = torch.cat([start, (start + hop) % ITEMS], dim=1)
    return seq[:, :-1], seq[:, -1], torch.randint(ITEMS, (BATCH, 8), generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    tower = Tower()
    fully_shard(tower.mlp)
    fully_shard(tower)
    table = ModuloTable(ITEMS, DIM, seed=10)
    dense_opt = torch.optim.Adam(tower.parameters(), lr=5e-3)
    table_opt = torch.optim.Adagrad(table.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(77)

    step = 0
    if args.resume:
        folder = max(glob.glob(os.path.join(args.resume, "*")), key=lambda p: int(os.path.basename(p)))
        ck = torch.load(os.path.join(folder, f"{rank}-of-{world}.pt"), weights_only=False)
        tower.load_state_dict(ck["tower"])
        dense_opt.load_state_dict(ck["dense_opt"])
        table.load_state_dict(ck["table"])
        table_opt.load_state_dict(ck["table_opt"])
        g.set_state(ck["data"])
        step = ck["step"]
    while step < args.steps:
        history, target, negative = (t.chunk(world)[rank] for t in sessions(g))
        user = tower(table(history))
        items = table(torch.cat([target[:, None], negative], dim=1))
        loss = F.cross_entropy((items @ user[:, :, None]).squeeze(2), torch.zeros(len(target), dtype=torch.long))
        loss.backward()
        for opt in (dense_opt, table_opt):
            opt.step()
            opt.zero_grad()
        step += 1
        if step % 4 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            folder = os.path.join(args.out, str(step))
            os.makedirs(folder, exist_ok=True)
            torch.save({"tower": tower.state_dict(), "dense_opt": dense_opt.state_dict(), "table": table.state_dict(),
                        "table_opt": table_opt.state_dict(), "data": g.get_state(), "step": step},
                       os.path.join(folder, f"{rank}-of-{world}.pt"))
            dist.barrier()
    whole = table.whole()
    if rank == 0:
        print(f"table norm {whole.norm().item():.6f} weighted sum {(whole * torch.arange(ITEMS)[:, None]).sum().item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
