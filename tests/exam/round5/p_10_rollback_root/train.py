"""Fine-tuning with 'reduce on plateau and go back': when the validation loss gets worse, the learning rate is
lowered and training goes on from the best weights so far."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

D = 12


class Gated(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(d, 2 * d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.c(torch.sigmoid(self.a(x)) * self.b(x))


class Net(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.stem = nn.Linear(D, d)
        self.blocks = nn.ModuleList(Gated(d) for _ in range(2))
        self.head = nn.Linear(d, 5)

    def forward(self, x):
        h = self.stem(x)
        for b in self.blocks:
            h = b(h)
        return self.head(h)


def split(seed, n):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(D, 5, generator=torch.Generator().manual_seed(0))
    x = torch.randn(n, D, generator=g)
    y = (x @ w + 1.5 * torch.randn(n, 5, generator=g)).argmax(1)
    return x, y


def local(p):
    return p.to_local() if isinstance(p, DTensor) else p


class Plateau:
    def __init__(self, model, opt, shrink):
        self.model, self.opt, self.shrink = model, opt, shrink
        self.best, self.kept, self.returns = float("inf"), None, 0

    @torch.no_grad()
    def report(self, val):
        if val < self.best:
            self.best = val
            self.kept = [local(p).detach().clone() for p in self.model.parameters()]
            return "best"
        for p, k in zip(self.model.parameters(), self.kept):
            local(p).copy_(k)
        for g in self.opt.param_groups:
            g["lr"] *= self.shrink
        self.returns += 1
        return "back"


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--eval-every", type=int, default=3)
    ap.add_argument("--lr", type=float, default=4e-2)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = Net()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model, reshard_after_forward=True)
    opt = torch.optim.SGD(model.parameters(), lr=a.lr * 5, momentum=0.9)
    plateau = Plateau(model, opt, 0.6)
    (xt, yt), (xv, yv) = split(1, 192), split(2, 64)
    g = torch.Generator().manual_seed(3)
    for step in range(1, a.steps + 1):
        mine = torch.randint(0, len(xt), (a.batch,), generator=g).chunk(world)[rank]
        loss = nn.functional.cross_entropy(model(xt[mine]), yt[mine])
        loss.backward()
        opt.step()
        opt.zero_grad()
        s = loss.detach().clone()
        dist.all_reduce(s)
        line = f"step {step} loss {s.item() / world:.4f}"
        if step % a.eval_every == 0:
            with torch.no_grad():
                v = nn.functional.cross_entropy(model(xv.chunk(world)[rank]), yv.chunk(world)[rank])
            dist.all_reduce(v)
            what = plateau.report(v.item() / world)
            line += f" val {v.item() / world:.4f} {what}"
        if rank == 0:
            print(line, flush=True)
    if rank == 0:
        print(f"best val {plateau.best:.4f}, went back {plateau.returns} times")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
