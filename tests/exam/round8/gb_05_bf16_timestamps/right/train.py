import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from net import LoadForecaster

WINDOW, HORIZON, YEARS = 24, 6, 2
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def load_curve(hours, g):
    day = torch.sin(hours * 2 * math.pi / 24) + 0.5 * torch.cos(hours * 2 * math.pi / 12)
    week = 0.6 * torch.sin(hours * 2 * math.pi / 168)
    year = 0.8 * torch.cos(hours * 2 * math.pi / 8760)
    return day + week + year + 0.1 * torch.randn(hours.shape, generator=g)


def batch(series, starts):
    past = torch.stack([series[s:s + WINDOW] for s in starts.tolist()])
    target = torch.stack([series[s + WINDOW:s + WINDOW + HORIZON] for s in starts.tolist()])
    hours = (starts[:, None] + WINDOW + torch.arange(HORIZON)).float()
    # half of the past is missing, as for meters that report late
    past = past.clone()
    past[:, WINDOW // 2:] = 0
    return past, hours, target


def build(args):
    torch.manual_seed(args.seed)
    model = LoadForecaster(WINDOW, HORIZON)
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for blk in model.blocks:
        fully_shard(blk, mp_policy=mp)
    fully_shard(model, mp_policy=mp)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr)


def main(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    model, opt = build(args)
    series = load_curve(torch.arange(YEARS * 8760).float(), torch.Generator().manual_seed(8))
    split = len(series) - 2000
    gen = torch.Generator().manual_seed(args.seed)
    done = 0

    if args.resume:
        newest = sorted(os.listdir(args.resume))[-1]
        ck = torch.load(os.path.join(args.resume, newest))
        set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["optim"], options=FULL)
        gen.set_state(ck["rng"])
        done = ck["done"]

    for i in range(done, args.steps):
        starts = torch.randint(split - WINDOW - HORIZON, (args.batch,), generator=gen)
        past, hours, target = batch(series, starts.chunk(world)[rank])
        loss = F.mse_loss(model(past, hours), target)
        loss.backward()
        opt.step()
        opt.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and (i + 1) % 10 == 0:
            print(f"step {i + 1} mse {total.item() / world:.5f}", flush=True)
        if args.save_every and (i + 1) % args.save_every == 0:
            model_sd, opt_sd = get_state_dict(model, opt, options=FULL)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"model": model_sd, "optim": opt_sd, "rng": gen.get_state(), "done": i + 1},
                           os.path.join(args.out, f"ckpt-{i + 1:05d}.pt"))
            dist.barrier()

    model.eval()
    with torch.no_grad():
        starts = torch.arange(split, len(series) - WINDOW - HORIZON, 8)[:240].chunk(world)[rank]
        past, hours, target = batch(series, starts)
        err = (model(past, hours) - target).square().sum()
    dist.all_reduce(err)
    if rank == 0:
        print(f"validation mse {err.item() / (240 * HORIZON):.5f}")
    return model


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=4)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="out")
    p.add_argument("--resume", default="")
    a = p.parse_args()
    dist.init_process_group("gloo")
    model = main(a)
    dist.destroy_process_group()
