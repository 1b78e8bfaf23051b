import argparse
import dataclasses
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from adafactor import ShardedAdafactor


@dataclasses.dataclass
class Config:
    users: int = 301
    items: int = 203
    dim: int = 16
    batch: int = 128
    steps: int = 80
    lr: float = 0.02
    seed: int = 13


class NeuMF(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.user = nn.Embedding(cfg.users, cfg.dim)
        self.item = nn.Embedding(cfg.items, cfg.dim)
        self.mlp = nn.Sequential(nn.Linear(2 * cfg.dim, 32), nn.Tanh(), nn.Linear(32, cfg.dim))
        self.out = nn.Linear(2 * cfg.dim, 1)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)

    def forward(self, u, i):
        pu, qi = self.user(u), self.item(i)
        deep = self.mlp(torch.cat([pu, qi], dim=1))
        return self.out(torch.cat([pu * qi, deep], dim=1))


def ratings(cfg):
    g = torch.Generator().manual_seed(cfg.seed)
    p = torch.randn(cfg.users, 4, generator=g)
    q = torch.randn(cfg.items, 4, generator=g)
    # popular items are seen far more often
    pop = 1.0 / torch.arange(1, cfg.items + 1).float()
    u = torch.randint(0, cfg.users, (12000,), generator=g)
    i = torch.multinomial(pop, 12000, replacement=True, generator=g)
    r = (p[u] * q[i]).sum(1) / 2 + 0.1 * torch.randn(12000, generator=g)
    return u, i, r


def run(cfg, args):
    rank, world = dist.get_rank(), dist.get_world_size()
    u, i, r = ratings(cfg)
    train, test = slice(0, 10000), slice(10000, 12000)
    torch.manual_seed(cfg.seed)
    model = NeuMF(cfg)
    fully_shard(model.mlp)
    fully_shard(model)
    opt = ShardedAdafactor(model.parameters(), lr=cfg.lr)
    g = torch.Generator().manual_seed(cfg.seed + 1)
    first = 0
    if args.resume:
        newest = max(int(f.split("_")[0]) for f in os.listdir(args.resume))
        ck = torch.load(os.path.join(args.resume, f"{newest}_{rank}.pt"), weights_only=False)
        model.load_state_dict(ck["model"])
        opt.load_state_dict(ck["opt"])
        g.set_state(ck["gen"])
        first = newest

    for step in range(first, cfg.steps):
        rows = torch.randint(0, 10000, (cfg.batch,), generator=g).tensor_split(world)[rank]
        loss = F.mse_loss(model(u[rows], i[rows]).squeeze(1), r[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % 10 == 0:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} mse {shown.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save(
                {"model": model.state_dict(), "opt": opt.state_dict(), "gen": g.get_state()},
                os.path.join(args.out, f"{step + 1}_{rank}.pt"),
            )
    with torch.no_grad():
        rmse = F.mse_loss(model(u[test], i[test]).squeeze(1), r[test]).sqrt()
    if rank == 0:
        print(f"test rmse {rmse.item():.5f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="neumf")
    ap.add_argument("--resume")
    dist.init_process_group("gloo")
    run(Config(), ap.parse_args())
    dist.destroy_process_group()
