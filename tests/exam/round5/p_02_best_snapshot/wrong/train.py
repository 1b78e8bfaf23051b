"""Fine-tunes a small regressor with noisy labels, keeps the best weights in memory and exports them at the end."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self, d=12, h=32):
        super().__init__()
        self.inp = nn.Linear(d, h)
        self.mid = nn.Sequential(nn.Linear(h, h), nn.SiLU(), nn.Linear(h, h))
        self.out = nn.Linear(h, 1)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        return self.out(x + self.mid(x)).squeeze(-1)


def make_data(seed, n, noise, d=12):
    g = torch.Generator().manual_seed(seed)
    teacher = torch.randn(d, 3, generator=torch.Generator().manual_seed(1234))
    x = torch.randn(n, d, generator=g)
    z = x @ teacher / d ** 0.5
    y = torch.sin(z[:, 0]) + z[:, 1] * 0.5 + (z[:, 2] > 0).float()
    return x, y + noise * torch.randn(n, generator=g)


class BestKeeper:
    """Remembers the sharded weights of the step with the lowest validation loss."""

    def __init__(self, model):
        self.model = model
        self.best = float("inf")
        self.step = -1
        self.shards = {}

    def update(self, step, value):
        state = self.model.state_dict()
        if value < self.best:
            self.best, self.step = value, step
            self.shards = {k: p.to_local().clone() if hasattr(p, "to_local") else p.clone()
                           for k, p in state.items()}
            return True
        return False

    @torch.no_grad()
    def restore(self):
        for k, p in self.model.state_dict().items():
            local = p.to_local() if hasattr(p, "to_local") else p
            local.copy_(self.shards[k])


@torch.no_grad()
def validate(model, x, y, rank, world):
    model.eval()
    xs, ys = x[rank::world], y[rank::world]
    sq = torch.stack([(model(xs) - ys).square().sum(), torch.tensor(float(len(xs)))])
    val = (sq[0] / sq[1]).item()
    model.train()
    return val


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=3e-2)
    ap.add_argument("--export", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.mid)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr)
    xt, yt = make_data(1, 256, 0.6)
    xv, yv = make_data(2, 16, 0.6)
    keeper = BestKeeper(model)
    order = torch.Generator().manual_seed(77)
    for step in range(a.steps):
        pick = torch.randint(0, len(xt), (a.batch,), generator=order)
        mine = pick.chunk(world)[rank]
        loss = (model(xt[mine]) - yt[mine]).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        avg = loss.detach().clone()
        dist.all_reduce(avg)
        val = validate(model, xv, yv, rank, world)
        mark = keeper.update(step + 1, val)
        if rank == 0:
            print(f"step {step + 1:3d} loss {avg.item() / world:.4f} val {val:.4f}{' *' if mark else ''}", flush=True)
    keeper.restore()
    final = validate(model, xv, yv, rank, world)
    if rank == 0:
        print(f"restored the weights of step {keeper.step}, val {final:.4f}")
    full = {k: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for k, p in model.state_dict().items()}
    if a.export and rank == 0:
        torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
