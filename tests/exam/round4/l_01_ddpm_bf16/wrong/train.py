"""Tiny DDPM with bf16 compute under FSDP2."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import ckpt
from data import GlobalBatches, make_images
from diffusion import Schedule
from unet import TinyUNet


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--fp32", action="store_true", help="no mixed precision (debugging)")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume", default=None)
    return p.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)

    model = TinyUNet()
    mp = MixedPrecisionPolicy() if args.fp32 else MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for block in model.blocks():
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=mp.param_dtype, reduce_dtype=mp.reduce_dtype))
    fully_shard(model, mp_policy=mp)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-4)

    start = ckpt.load(args.resume, model, opt) if args.resume else 0
    batches = GlobalBatches(make_images(256), args.batch, rank, world)
    sched = Schedule()

    for step in range(start, args.steps):
        x0 = batches.at(step)
        t, eps = sched.draw(step, args.batch, x0.shape[1:], rank, world)
        xt = sched.noise(x0, t, eps)
        pred = model(xt, t.float())
        loss = F.mse_loss(pred, eps)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()

        if step % 5 == 0 or step == args.steps - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3d} loss {mean.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            ckpt.save(args.out, step + 1, model, opt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
