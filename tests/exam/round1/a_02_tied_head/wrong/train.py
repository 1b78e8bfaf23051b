"""torchrun --standalone --nproc-per-node 2 train.py --steps 30 [--save-every 3 --out DIR] [--resume DIR]"""

import argparse
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

import checkpoint
from data import WindowLoader, token_stream
from model import GPTConfig
from parallel import build


def param_groups(model, wd):
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": wd},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--warmup", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = GPTConfig()
    model = build(cfg, world, seed=42)
    opt = torch.optim.AdamW(param_groups(model, 0.1), lr=args.lr, betas=(0.9, 0.95))
    loader = WindowLoader(token_stream(cfg.vocab_size, 6000), cfg.block_size, args.batch, rank, world)

    start = checkpoint.load_newest(args.resume, model, opt) if args.resume else 0
    for step in range(start, args.steps):
        lr = args.lr * min((step + 1) / args.warmup, 0.5 * (1 + math.cos(math.pi * step / args.steps)) + 0.05)
        for group in opt.param_groups:
            group["lr"] = lr
        x, y = loader.get(step)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        norm = norm.full_tensor()
        if rank == 0:
            print(
                f"step {step + 1:3d} | loss {mean.item() / world:.4f} | gnorm {norm.item():.3f} | lr {lr:.2e}",
                flush=True,
            )
        if args.save_every and (step + 1) % args.save_every == 0:
            checkpoint.save(args.out, step + 1, model, opt)

    if args.export:
        checkpoint.export(args.export, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
