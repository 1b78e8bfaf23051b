"""Small parameters are kept out of the sharding (ignored_params) and averaged by hand in one flat all-reduce."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


class ScaledLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d, d) / d**0.5)
        self.gain = nn.Parameter(torch.ones(d))
        self.shift = nn.Parameter(torch.zeros(d))

    def forward(self, x):
        return x + torch.tanh(x @ self.weight * self.gain + self.shift)


class Regressor(nn.Module):
    def __init__(self, d=28):
        super().__init__()
        self.inp = nn.Linear(9, d)
        self.layers = nn.ModuleList(ScaledLayer(d) for _ in range(3))
        self.out = nn.Linear(d, 1)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x).squeeze(1) * self.temperature


class HybridReplicas:
    """The replicated part: the same start on all ranks (one seed), averaged gradients, so they stay equal."""

    def __init__(self, model, limit):
        self.params = [p for p in model.parameters() if p.numel() <= limit]
        self.ids = set(map(id, self.params))

    def sync_grads(self):
        flat = torch.cat([p.grad.reshape(-1) for p in self.params])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, g in zip(self.params, flat.split([p.numel() for p in self.params])):
            p.grad.copy_(g.view_as(p))

    def clip(self, model, max_norm):
        sharded = torch.zeros(())
        replicated = torch.zeros(())
        for p in model.parameters():
            if isinstance(p, DTensor):
                sharded += p.grad.to_local().square().sum()
            else:
                replicated += p.grad.square().sum()
        dist.all_reduce(sharded)
        norm = (sharded + replicated).sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in model.parameters():
            (p.grad.to_local() if isinstance(p, DTensor) else p.grad).mul_(factor)
        return norm


def problem(step, n, rank, world):
    g = torch.Generator().manual_seed(step + 1)
    x = torch.randn(n, 9, generator=g)
    y = x[:, 0] * x[:, 1] + torch.sin(2 * x[:, 2]) + 0.5 * x[:, 3:].sum(1)
    return x[rank::world], y[rank::world]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(10)
    model = Regressor()
    small = HybridReplicas(model, limit=64)
    for layer in model.layers:
        fully_shard(layer, ignored_params=set(small.params))
    fully_shard(model, ignored_params=set(small.params))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    # One file per rank: shards differ, replicated parameters are the same everywhere.
    def file(folder, step):
        return Path(folder) / f"step{step}" / f"{rank}-{world}.pt"

    def raw(t):
        return t.to_local() if isinstance(t, DTensor) else t

    begin = 0
    if args.resume:
        begin = max(int(p.name[4:]) for p in Path(args.resume).glob("step*"))
        blob = torch.load(file(args.resume, begin))
        with torch.no_grad():
            for p, w, m in zip(model.parameters(), blob["w"], blob["m"], strict=True):
                raw(p).copy_(w)
                buf = torch.zeros_like(p, requires_grad=False)
                raw(buf).copy_(m)
                opt.state[p]["momentum_buffer"] = buf

    for step in range(begin, args.steps):
        x, y = problem(step, 96, rank, world)
        loss = F.smooth_l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        small.sync_grads()
        norm = small.clip(model, 1.0)
        opt.step()
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            f = file(args.out, step + 1)
            f.parent.mkdir(parents=True, exist_ok=True)
            params = list(model.parameters())
            torch.save(
                {"w": [raw(p).detach() for p in params], "m": [raw(opt.state[p]["momentum_buffer"]) for p in params]}, f
            )
            dist.barrier()
        dist.all_reduce(shown := loss.detach().clone())
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.4f} norm {norm.item():.3f}", flush=True)

    if args.export:
        full = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
