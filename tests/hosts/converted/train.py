"""before.py with FSDP2 in the place of DDP, and a checkpoint that any number of ranks can resume from."""

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from net import PAD, Decoder, batch_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--clip", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=Path("checkpoints"))
    parser.add_argument("--save-every", type=int, default=6)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def groups(model):
    """Norms and biases are not decayed."""
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def save(folder, state, model, optimizer, scheduler):
    """Under a temporary name first: a folder with its good name is complete."""
    weights, moments = get_state_dict(model, optimizer)
    temporary = folder / f"tmp-{state['step']:06d}"
    values = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), **state}
    dcp.save(values, checkpoint_id=temporary)
    if dist.get_rank() == 0:
        temporary.rename(folder / f"step-{state['step']:06d}")
    dist.barrier()


def load(folder, model, optimizer, scheduler):
    weights, moments = get_state_dict(model, optimizer)
    values = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": 0}
    dcp.load(values, checkpoint_id=max(folder.glob("step-*")))
    set_state_dict(model, optimizer, model_state_dict=values["model"], optim_state_dict=values["optimizer"])
    scheduler.load_state_dict(values["scheduler"])
    return values["step"]


def main():
    args = parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(3)
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups(model), lr=args.lr, betas=(0.9, 0.95))

    def factor(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / (args.steps - args.warmup)))

    scheduler = LambdaLR(optimizer, factor)
    start = load(args.out, model, optimizer, scheduler) if args.resume else 0
    micro = args.global_batch // (world * args.accumulate)
    for step in range(start, args.steps):
        first = step * args.global_batch + rank * micro * args.accumulate
        batches = [batch_of(first + k * micro, micro) for k in range(args.accumulate)]
        valid = torch.tensor(sum(int((y != PAD).sum()) for _, y in batches))
        dist.all_reduce(valid)
        for k, (x, y) in enumerate(batches, start=1):
            model.set_requires_gradient_sync(k == args.accumulate)
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
            (loss * world / valid).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if (step + 1) % args.save_every == 0:
            save(args.out, {"step": step + 1}, model, optimizer, scheduler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
