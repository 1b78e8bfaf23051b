"""Multi-series forecaster. The backbone is sharded with FSDP2; the small per-series scale and level stay replicated."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

CONTEXT, HORIZON, SERIES = 24, 6, 8


class Forecaster(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(SERIES))
        self.level = nn.Parameter(torch.zeros(SERIES))
        self.inp = nn.Linear(CONTEXT, width)
        self.hidden = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(2))
        self.out = nn.Linear(width, HORIZON)

    def forward(self, x, sid):
        x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
        h = self.inp(x)
        for layer in self.hidden:
            h = h + layer(h)
        return self.out(h) * self.scale[sid, None] + self.level[sid, None]


def make_batch(step, size):
    g = torch.Generator().manual_seed(40 + step)
    sid = torch.randint(SERIES, (size,), generator=g)
    t = torch.arange(CONTEXT + HORIZON) + 100 * torch.rand(size, 1, generator=g)
    period = 6 + 2.0 * sid[:, None]
    y = (1 + 0.3 * sid[:, None]) * torch.sin(2 * torch.pi * t / period) + 1.5 * (sid[:, None] - 3.5)
    y = y + 0.1 * torch.randn(y.shape, generator=g)
    return y[:, :CONTEXT], y[:, CONTEXT:], sid


def clip_(sharded, replicated, max_norm):
    """Clip by the global norm; sharded gradients are summed over ranks, replicated ones are the same everywhere."""
    sq = torch.stack([p.grad.to_local().pow(2).sum() for p in sharded]).sum()
    dist.all_reduce(sq)
    sq = sq + torch.stack([p.grad.pow(2).sum() for p in replicated]).sum()
    norm = sq.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in sharded:
        p.grad.to_local().mul_(factor)
    for p in replicated:
        p.grad.mul_(factor)
    return norm


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume", default=None)
    ap.add_argument("--export", default=None)
    cfg = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = Forecaster()
    replicated = [model.scale, model.level]
    for layer in model.hidden:
        fully_shard(layer)
    fully_shard(model, ignored_params=set(replicated))
    keep = {id(p) for p in replicated}
    sharded = [p for p in model.parameters() if id(p) not in keep]
    opt = torch.optim.SGD([{"params": sharded}, {"params": replicated, "lr": 0.3}], lr=0.08, momentum=0.8)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.2, total_iters=cfg.steps)
    start = 0

    if cfg.resume:
        last = max(int(f.split("-")[0]) for f in os.listdir(cfg.resume) if f.endswith(f"rank{rank}.pt"))
        ck = torch.load(os.path.join(cfg.resume, f"{last}-rank{rank}.pt"))
        with torch.no_grad():
            for name, p in model.named_parameters():
                (p if id(p) in keep else p.to_local()).copy_(ck["params"][name])
        for p in sharded + replicated:
            opt.state[p]["momentum_buffer"] = torch.zeros_like(p)
        for p, m in zip(sharded + replicated, ck["momentum"]):
            buf = opt.state[p]["momentum_buffer"]
            (buf if id(p) in keep else buf.to_local()).copy_(m)
        sched.load_state_dict(ck["sched"])
        for group, lr in zip(opt.param_groups, ck["lr"]):
            group["lr"] = lr
        start = last

    for step in range(start, cfg.steps):
        x, y, sid = (v.chunk(world)[rank] for v in make_batch(step, cfg.batch))
        loss = (model(x, sid) - y).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        for p in replicated:
            dist.all_reduce(p.grad)
            p.grad.div_(world)
        norm = clip_(sharded, replicated, 1.0)
        opt.step()
        sched.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and (step + 1) % 6 == 0:
            print(f"{step + 1:3d} mse {mean.item():.4f} norm {norm.item():.3f}")
        if cfg.save_every and (step + 1) % cfg.save_every == 0:
            os.makedirs(cfg.out, exist_ok=True)
            torch.save({
                "params": {n: (p if id(p) in keep else p.to_local()).detach().clone() for n, p in model.named_parameters()},
                "momentum": [(b if id(p) in keep else b.to_local()).clone()
                             for p in sharded + replicated for b in [opt.state[p]["momentum_buffer"]]],
                "sched": sched.state_dict(), "lr": [g["lr"] for g in opt.param_groups],
            }, os.path.join(cfg.out, f"{step + 1}-rank{rank}.pt"))

    if cfg.export:
        full = {n: (p if id(p) in keep else p.full_tensor()).detach() for n, p in model.named_parameters()}
        if rank == 0:
            torch.save(full, cfg.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
