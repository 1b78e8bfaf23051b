"""Dropout and input noise drawn per sample from (seed, step, sample number): the same masks whatever the number of ranks,
and no random state to store."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

D, H = 10, 24


class CounterNoise:
    """One generator per sample of the batch; layers take their masks one after the other."""

    def __init__(self, seed, step, ids):
        self.gens = [torch.Generator().manual_seed((seed * 1_000_003 + step) * 4099 + int(i)) for i in ids]

    def normal(self, n):
        return torch.stack([torch.randn(n, generator=g) for g in self.gens])

    def dropout(self, x, p):
        keep = torch.stack([torch.rand(x.shape[1], generator=g) for g in self.gens]) >= p
        return x * keep / (1 - p)


class Block(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(h), nn.Linear(h, 2 * h), nn.Linear(2 * h, h)

    def forward(self, x, noise):
        h = torch.relu(self.up(self.norm(x)))
        if noise is not None:
            h = noise.dropout(h, 0.2)
        return x + self.down(h)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(D, H)
        self.blocks = nn.ModuleList(Block(H) for _ in range(2))
        self.head = nn.Linear(H, 3)

    def forward(self, x, noise=None):
        if noise is not None:
            x = x + 0.1 * noise.normal(D)
        h = self.stem(x)
        for b in self.blocks:
            h = b(h, noise)
        return self.head(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="noise")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(40)
    x = torch.randn(512, D, generator=g)
    y = (x @ torch.randn(D, 3, generator=g) + x[:, :3] ** 2).argmax(1)
    torch.manual_seed(a.seed)
    model = Net()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=0.05)
    start = 0
    if a.resume:
        start = max(int(n) for n in os.listdir(a.resume) if n.isdigit())
        m, o = get_state_dict(model, opt)
        sd = {"model": m, "optim": o}
        dcp.load(sd, checkpoint_id=os.path.join(a.resume, str(start)))
        set_state_dict(model, opt, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
    for step in range(start, a.steps):
        pick = torch.randperm(512, generator=torch.Generator().manual_seed(step))[: a.batch]
        mine = pick[rank::world]
        loss = nn.functional.cross_entropy(model(x[mine], CounterNoise(a.seed, step, mine)), y[mine])
        loss.backward()
        opt.step()
        opt.zero_grad()
        s = loss.detach().clone()
        dist.all_reduce(s)
        if rank == 0:
            print(f"step {step + 1} loss {s.item() / world:.4f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o}, checkpoint_id=os.path.join(a.out, str(step + 1)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
