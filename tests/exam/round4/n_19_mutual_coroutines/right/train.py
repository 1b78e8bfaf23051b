"""Deep mutual learning on short time series: two different networks teach each other.

Each peer is a coroutine. It is sent a batch, yields its own logits, is sent the other's logits, takes its step and
yields its loss; the conductor below only passes messages.
"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def waves(n=512, length=24, seed=71):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(4, (n,), generator=g)
    t = torch.linspace(0, 1, length)
    phase = torch.rand(n, 1, generator=g)
    base = torch.stack([torch.sin(12.6 * (t + phase)), torch.sign(torch.sin(12.6 * (t + phase))),
                        ((2 * (t + phase)) % 1) * 2 - 1, torch.sin(25 * (t + phase) * t)])
    x = base[kind, torch.arange(n)] + 0.2 * torch.randn(n, length, generator=g)
    return x, kind


class ConvPeer(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(1, ch, 5, padding=2), nn.Conv1d(ch, ch, 5, padding=2)
        self.out = nn.Linear(ch, 4)

    def forward(self, x):
        h = F.relu(self.c2(F.relu(self.c1(x[:, None]))))
        return self.out(h.amax(2))


class SpectralPeer(nn.Module):
    def __init__(self, length=24, width=32):
        super().__init__()
        self.inp = nn.Linear(length // 2 + 1 + length, width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 4)

    def forward(self, x):
        h = torch.cat([torch.fft.rfft(x, dim=1).abs(), x], 1)
        h = F.gelu(self.inp(h))
        return self.out(h + F.gelu(self.mid(h)))


def peer(model, opt, weight, temperature=2.0):
    """send(batch) -> logits; send(other's logits) -> loss; and again."""
    message = None
    while True:
        x, y = yield message
        logits = model(x)
        other = yield logits.detach()
        kd = F.kl_div((logits / temperature).log_softmax(1), (other / temperature).softmax(1), reduction="batchmean")
        loss = F.cross_entropy(logits, y) + weight * temperature**2 * kd
        loss.backward()
        opt.step()
        opt.zero_grad()
        message = loss.detach()


def batches(n, size, steps, rank, world):
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        yield step, torch.randperm(n, generator=g)[:size].chunk(world)[rank]


def averaged(*values):
    v = torch.stack(values)
    dist.all_reduce(v)
    return (v / dist.get_world_size()).tolist()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--kd", type=float, default=0.5)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    x, y = waves()
    models = [ConvPeer(), SpectralPeer()]
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(models[0].c2, mesh=mesh)
    fully_shard(models[1].mid, mesh=mesh)
    for m in models:
        fully_shard(m, mesh=mesh)
    opts = [torch.optim.Adam(models[0].parameters(), lr=0.01),
            torch.optim.SGD(models[1].parameters(), lr=0.05, momentum=0.9, nesterov=True)]
    a, b = (peer(m, o, args.kd) for m, o in zip(models, opts))
    next(a), next(b)

    for step, rows in batches(len(x), args.batch, args.steps, rank, world):
        batch = x[rows], y[rows]
        said_a, said_b = a.send(batch), b.send(batch)
        loss_a, loss_b = a.send(said_b), b.send(said_a)
        acc = [(s.argmax(1) == y[rows]).float().mean() for s in (said_a, said_b)]
        shown = averaged(loss_a, loss_b, *acc)
        if rank == 0 and step % 5 == 0:
            print("step {} loss {:.4f} {:.4f} acc {:.2f} {:.2f}".format(step, *shown), flush=True)

    a.close(), b.close()
    if args.export:
        full = {n: {k: v.full_tensor() for k, v in m.state_dict().items()} for n, m in zip(("conv", "spectral"), models)}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
