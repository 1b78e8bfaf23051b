"""Noise-prediction diffusion on 8x8 blobs; FSDP2 with bf16 parameters and activations."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from data import blobs, draw
from schedule import NoiseSchedule
from unet import TinyDenoiser


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--fp32", action="store_true")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    return ap.parse_args()


def build(fp32):
    torch.manual_seed(0)
    model = TinyDenoiser()
    low = None if fp32 else torch.bfloat16
    mp = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for b in model.blocks:
        fully_shard(b, mp_policy=mp)
    return fully_shard(model, mp_policy=mp)


def snapshot(model, opt, step):
    m, o = get_state_dict(model, opt)
    return {"model": m, "optim": o, "meta": {"step": torch.tensor(step)}}


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(args.fp32)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-6)
    sched = NoiseSchedule()
    data = blobs(256, seed=5)

    start = 0
    if args.resume:
        last = max(os.listdir(args.resume), key=lambda d: int(d.split("-")[-1]))
        state = snapshot(model, opt, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = int(state["meta"]["step"])

    running = None
    for step in range(start, args.steps):
        x, t, eps = (v.chunk(world)[rank] for v in draw(data, step, args.batch, sched.steps))
        noisy = sched.add_noise(x, eps, t)
        pred = model(noisy, t).float()
        loss = (pred - eps).square().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        total = total.item() / world
        running = total if running is None else 0.9 * running + 0.1 * total
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:3d} loss {total:.4f} smoothed {running:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(model, opt, step + 1), checkpoint_id=os.path.join(args.out, f"step-{step + 1}"))

    if args.export:
        weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
