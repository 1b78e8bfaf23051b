"""Fits a coordinate network to one high resolution picture, with bfloat16 compute."""
import argparse
import math
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from model import CoordNet

SIZE = 1024


def picture(xy):
    """The target: a fine grating over slow shading, evaluated at positions in [0, 1]^2."""
    x, y = xy[:, 0].double(), xy[:, 1].double()
    fine = torch.sin(2 * math.pi * 96 * x + 3 * torch.sin(2 * math.pi * y))
    slow = torch.cos(2 * math.pi * (x + 2 * y))
    return (0.6 * fine + 0.4 * slow).float()


def pixel_batch(n, gen):
    ij = torch.randint(0, SIZE, (n, 2), generator=gen)
    return (ij.float() + 0.5) / SIZE


def newest(folder):
    steps = [int(m.group(1)) for m in (re.fullmatch(r"it(\d+)", f) for f in os.listdir(folder)) if m]
    return os.path.join(folder, f"it{max(steps)}")


@torch.no_grad()
def psnr(model):
    xy = pixel_batch(4096, torch.Generator().manual_seed(5))
    mse = (model(model.encode(xy)).float().squeeze(-1) - picture(xy)).pow(2).mean()
    return 10 * math.log10(4.0 / mse.item())


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(11)
    model = CoordNet()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.iters)
    gen = torch.Generator().manual_seed(12)
    it = 0
    if args.resume:
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o, "sched": sched.state_dict(), "gen": gen.get_state(), "it": 0}
        dcp.load(state, checkpoint_id=newest(args.resume))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        sched.load_state_dict(state["sched"])
        gen.set_state(state["gen"])
        it = state["it"]

    while it < args.iters:
        xy = pixel_batch(args.batch, gen)[rank::world]
        pred = model(model.encode(xy)).float().squeeze(-1)
        loss = (pred - picture(xy)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        it += 1
        if it % 40 == 0:
            dist.all_reduce(loss.detach_())
            quality = psnr(model)
            if rank == 0:
                print(f"it {it} loss {loss.item() / world:.5f} psnr {quality:.2f} dB")
        if args.save_every and it % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            state = {"model": m, "opt": o, "sched": sched.state_dict(), "gen": gen.get_state(), "it": it}
            dcp.save(state, checkpoint_id=os.path.join(args.out, f"it{it}"))

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--iters", type=int, default=120)
    p.add_argument("--batch", type=int, default=512)
    p.add_argument("--lr", type=float, default=6e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="out")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    main(p.parse_args())
