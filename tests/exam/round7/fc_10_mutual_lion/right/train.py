"""Deep mutual learning: two different students train at once, each on the labels and on the other's predictions.

In the last third of the run a stochastic weight average of each student is collected; the averages are what is exported.
"""
import argparse
import dataclasses
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from lion import Lion


@dataclasses.dataclass
class Peer:
    name: str
    net: nn.Module
    opt: torch.optim.Optimizer
    average: dict

    def state(self):
        moments = {n: self.opt.state[p] for n, p in self.net.named_parameters() if p in self.opt.state}
        return {"net": self.net.state_dict(), "opt": moments, "average": self.average}

    @torch.no_grad()
    def collect(self, count):
        for n, p in self.net.named_parameters():
            self.average[n].add_(p - self.average[n], alpha=1.0 / count)


class ConvNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


class MlpNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.features = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        return self.head(self.features(x))


def make_peers(lr):
    torch.manual_seed(14)
    peers = []
    for name, net in (("conv", ConvNet(12)), ("mlp", MlpNet(30))):
        fully_shard(net.features)
        fully_shard(net)
        avg = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
        peers.append(Peer(name, net, Lion(net.parameters(), lr=lr, weight_decay=0.01), avg))
    return peers


def batches(start, stop, size, rank, world):
    shapes = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(55))
    k = size // world
    for step in range(start, stop):
        g = torch.Generator().manual_seed(6000 + step)
        y = torch.randint(0, 5, (size,), generator=g)
        x = shapes[y] + 0.9 * torch.randn(size, 1, 8, 8, generator=g)
        yield step, x[rank * k:(rank + 1) * k], y[rank * k:(rank + 1) * k]


def mutual_losses(a, b, y):
    """Each one's loss sees the other's logits as constants."""
    def kl(p, q):
        return F.kl_div(F.log_softmax(p, -1), F.log_softmax(q.detach(), -1), log_target=True, reduction="batchmean")
    return F.cross_entropy(a, y) + kl(a, b), F.cross_entropy(b, y) + kl(b, a)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path)
    ap.add_argument("--resume", type=pathlib.Path)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    peers = make_peers(2e-3)
    swa_from = args.steps * 2 // 3

    start = 0
    if args.resume:
        folder = max(args.resume.iterdir(), key=lambda p: int(p.stem))
        st = {p.name: p.state() for p in peers} | {"step": torch.tensor(0)}
        dcp.load(st, checkpoint_id=folder)       # moments and averages are filled in place
        for p in peers:
            p.net.load_state_dict(st[p.name]["net"])
        start = int(st["step"])

    for step, x, y in batches(start, args.steps, args.batch, rank, world):
        a, b = peers[0].net(x), peers[1].net(x)
        loss_a, loss_b = mutual_losses(a, b, y)
        (loss_a + loss_b).backward()
        for p in peers:
            p.opt.step()
            p.opt.zero_grad()
            if step >= swa_from:
                p.collect(step - swa_from + 1)
        log = torch.stack([loss_a.detach(), loss_b.detach()]) / world
        dist.all_reduce(log)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} conv {log[0]:.5f} mlp {log[1]:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            st = {p.name: p.state() for p in peers} | {"step": torch.tensor(step + 1)}
            dcp.save(st, checkpoint_id=args.out / str(step + 1))

    if args.export:
        out = {p.name: {n: t.full_tensor() for n, t in p.average.items()} for p in peers}
        out |= {p.name + "_last": {n: t.detach().full_tensor() for n, t in p.net.named_parameters()} for p in peers}
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
