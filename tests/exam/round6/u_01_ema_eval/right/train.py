"""Denoising diffusion on 8x8 synthetic blobs, FSDP2, EMA weights for evaluation."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ema import ShardedEMA
from model import Denoiser

STEPS, BATCH, EVAL_EVERY = 18, 32, 2


def blobs(n, gen):
    ys, xs = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    cy = torch.rand(n, 1, 1, generator=gen) * 7
    cx = torch.rand(n, 1, 1, generator=gen) * 7
    img = torch.exp(-((ys - cy) ** 2 + (xs - cx) ** 2) / 4.0)
    return (img * 2 - 1).flatten(1)


def noised(x, gen):
    t = torch.rand(x.shape[0], generator=gen)
    eps = torch.randn(x.shape, generator=gen)
    a = torch.cos(t * torch.pi / 2)[:, None]
    s = torch.sin(t * torch.pi / 2)[:, None]
    return a * x + s * eps, t, eps


def part(t, rank, world):
    n = t.shape[0] // world
    return t[rank * n:(rank + 1) * n]


@torch.no_grad()
def evaluate(model, batch, rank, world):
    xt, t, eps = (part(v, rank, world) for v in batch)
    total = (model(xt, t) - eps).pow(2).mean()
    dist.all_reduce(total)
    return total.item() / world


def newest(folder):
    return os.path.join(folder, max(os.listdir(folder), key=lambda d: int(d.split("-")[1])))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(11)
    model = Denoiser()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    ema = ShardedEMA(model, decay=0.9)

    train_gen = torch.Generator().manual_seed(5)
    val_gen = torch.Generator().manual_seed(6)
    val_batch = noised(blobs(64, val_gen), val_gen)

    step = 0
    if args.resume:
        msd, osd = get_state_dict(model, opt)
        state = {"model": msd, "optim": osd, "ema": ema.state_dict(),
                 "step": torch.zeros((), dtype=torch.long), "gen": train_gen.get_state()}
        dcp.load(state, checkpoint_id=newest(args.resume))
        set_state_dict(model, opt, model_state_dict=msd, optim_state_dict=osd)
        train_gen.set_state(state["gen"])
        step = int(state["step"])

    while step < STEPS:
        xt, t, eps = noised(blobs(BATCH, train_gen), train_gen)
        xt, t, eps = (part(v, rank, world) for v in (xt, t, eps))
        loss = (model(xt, t) - eps).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema.update()
        step += 1
        if step % EVAL_EVERY == 0:
            raw = evaluate(model, val_batch, rank, world)
            with ema.applied():
                avg = evaluate(model, val_batch, rank, world)
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} val {raw:.6f} val_ema {avg:.6f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save({"model": msd, "optim": osd, "ema": ema.state_dict(),
                      "step": torch.tensor(step), "gen": train_gen.get_state()},
                     checkpoint_id=os.path.join(args.out, f"step-{step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
