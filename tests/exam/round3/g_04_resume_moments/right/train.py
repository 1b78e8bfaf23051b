import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from ckpt import Checkpointer
from config import Config
from data import TokenWindows
from model import RNNLM


def cosine(cfg):
    def factor(step):
        if step < cfg.warmup:
            return (step + 1) / cfg.warmup
        t = (step - cfg.warmup) / max(1, cfg.steps - cfg.warmup)
        return cfg.min_lr / cfg.lr + (1 - cfg.min_lr / cfg.lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, t)))

    return factor


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="checkpoints")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    cfg = Config(steps=args.steps)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(cfg.seed)
    model = RNNLM(cfg)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98), weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(cfg))
    checkpointer = Checkpointer(model, optimizer, scheduler)
    first = checkpointer.load(args.resume) if args.resume else 0
    if rank == 0 and first:
        print(f"resumed after step {first}, lr {scheduler.get_last_lr()[0]:.5f}")

    data = TokenWindows(cfg, rank, world)
    for step in range(first, cfg.steps):
        x, y = data.at(step)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip).full_tensor()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"{step + 1:4d} loss {shown:.4f} norm {norm:.3f} lr {scheduler.get_last_lr()[0]:.5f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            checkpointer.save(args.out, step + 1)

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
