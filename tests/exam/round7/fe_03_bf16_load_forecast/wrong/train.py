"""Electric load forecast: hourly load of several sites from the time stamp, bf16 compute with fp32 weights."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from model import build

SITES, HOURS, BATCH, STEPS = 6, 24 * 7 * 26, 128, 40


def make_series(seed=3):
    g = torch.Generator().manual_seed(seed)
    hours = torch.arange(HOURS)
    daily = torch.rand(SITES, 1, generator=g) * 24
    weekly = torch.rand(SITES, 1, generator=g) * 168
    load = torch.sin(2 * torch.pi * (hours + daily) / 24) + 0.5 * torch.sin(2 * torch.pi * (hours + weekly) / 168)
    return load + 0.05 * torch.randn(SITES, HOURS, generator=g)


def sample(series, step, rank, world, low=0, high=HOURS - 168):
    g = torch.Generator().manual_seed(10_000 + step)
    site = torch.randint(SITES, (BATCH,), generator=g).chunk(world)[rank]
    hours = torch.randint(low, high, (BATCH,), generator=g).chunk(world)[rank]
    return site, hours, series[site, hours]


def mse(model, site, hours, target):
    prediction = model(site, hours.float())
    return (prediction - target).square().mean()


@torch.no_grad()
def evaluate(model, series, rank, world):
    # the last week is held out
    site, hours, target = sample(series, -1, rank, world, low=HOURS - 168, high=HOURS)
    loss = mse(model, site, hours, target)
    dist.all_reduce(loss)
    return loss.item() / world


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="runs")
    parser.add_argument("--resume")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(SITES, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)
    series = make_series()

    first = 0
    if args.resume:
        path = os.path.join(args.resume, sorted(os.listdir(args.resume))[-1])
        model_sd, optim_sd = get_state_dict(model, optimizer)
        state = {"model": model_sd, "optim": optim_sd, "scheduler": scheduler.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        scheduler.load_state_dict(state["scheduler"])
        first = state["step"]

    for step in range(first, STEPS):
        site, hours, target = sample(series, step, rank, world)
        loss = mse(model, site, hours, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if (step + 1) % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} mse {mean.item() / world:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            model_sd, optim_sd = get_state_dict(model, optimizer)
            state = {"model": model_sd, "optim": optim_sd, "scheduler": scheduler.state_dict(), "step": step + 1}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"step{step + 1:05d}"))

    held_out = evaluate(model, series, rank, world)
    if rank == 0:
        print(f"held-out week mse {held_out:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
