"""Meta-learning (Reptile) of a forecaster for short sensor series.

Outer step: remember the weights, adapt to one sensor with a few SGD steps, go back, and hand the difference to the
outer optimizer as if it were a gradient. All ranks work on the same sensor, each on its part of the windows."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LAGS, WIDTH, WINDOWS, INNER, OUTER = 8, 24, 16, 3, 18


def sensor(task):
    g = torch.Generator().manual_seed(3000 + task)
    f, phase, level = torch.rand(3, generator=g).tolist()
    t = torch.arange(LAGS + 1 + WINDOWS * (INNER + 1.0))
    series = 0.6 * level + torch.sin((0.3 + 0.15 * f) * t + 6.28 * phase) + 0.05 * torch.randn(len(t), generator=g)
    w = series.unfold(0, LAGS + 1, 1)
    w = w[torch.randperm(len(w), generator=g)[: WINDOWS * (INNER + 1)]].view(INNER + 1, WINDOWS, LAGS + 1)
    return w[..., :-1], w[..., -1:]


def net():
    torch.manual_seed(17)
    return nn.Sequential(nn.Linear(LAGS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def adapt(model, xs, ys, lr):
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in zip(xs, ys):
        inner.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        inner.step()
    inner.zero_grad()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--inner-lr", type=float, default=0.08)
    ap.add_argument("--outer-lr", type=float, default=0.5)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=7)
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = fully_shard(net(), mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=True)
    outer = torch.optim.SGD(model.parameters(), lr=a.outer_lr, momentum=0.5)

    task = 0
    if a.resume:
        task = max(int(d) for d in os.listdir(a.resume))
        m, o = get_state_dict(model, outer)
        dcp.load({"m": m, "o": o}, checkpoint_id=f"{a.resume}/{task}")
        set_state_dict(model, outer, model_state_dict=m, optim_state_dict=o)

    history = []
    while task < OUTER:
        xs, ys = sensor(task)
        xs, ys = xs.chunk(world, 1)[rank], ys.chunk(world, 1)[rank]
        start = [p.detach().clone() for p in model.parameters()]
        adapt(model, xs[:INNER], ys[:INNER], a.inner_lr)
        with torch.no_grad():
            held_out = nn.functional.mse_loss(model(xs[INNER]), ys[INNER]) / world
            for p, s in zip(model.parameters(), start):
                p.grad = s - p
                p.copy_(s)
        outer.step()
        outer.zero_grad()
        dist.all_reduce(held_out)
        history.append(held_out.item())
        task += 1
        if rank == 0 and task % 3 == 0:
            print(f"outer {task} loss {sum(history[-3:]) / len(history[-3:]):.4f}", flush=True)
        if a.out and task % a.save_every == 0:
            m, o = get_state_dict(model, outer)
            dcp.save({"m": m, "o": o}, checkpoint_id=f"{a.out}/{task}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
