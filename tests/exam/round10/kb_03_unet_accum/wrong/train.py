import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from dataset import Discs, Loader
from unet import UNet

CLASSES = 4


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--micro-batch", type=int, default=8)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--ckpt-dir", default=None)
    p.add_argument("--ckpt-epochs", type=int, default=2)
    p.add_argument("--resume", default=None)
    return p.parse_args()


def save(path, model, optimizer, scheduler, epoch):
    opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {"model": get_model_state_dict(model, options=opts),
             "optimizer": get_optimizer_state_dict(model, optimizer, options=opts),
             "scheduler": scheduler.state_dict(), "epoch": epoch}
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(state, path)
    dist.barrier()


def load(folder, model, optimizer, scheduler):
    path = sorted(glob.glob(os.path.join(folder, "epoch_*.pt")))[-1]
    state = torch.load(path, map_location="cpu")
    opts = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state["model"], options=opts)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=opts)
    scheduler.load_state_dict(state["scheduler"])
    return state["epoch"]


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = UNet(CLASSES)
    for name in ("enc1", "enc2", "mid", "dec2", "dec1"):
        fully_shard(getattr(model, name))
    fully_shard(model)

    loader = Loader(Discs(80, classes=CLASSES), args.micro_batch, rank, world, seed=5)
    steps_per_epoch = -(-len(loader) // args.accum)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * steps_per_epoch)
    start = load(args.resume, model, optimizer, scheduler) if args.resume else 0

    for epoch in range(start, args.epochs):
        loader.epoch = epoch
        total = torch.zeros(1)
        for i, (x, y) in enumerate(loader):
            group_start = i - i % args.accum
            group_size = min(args.accum, len(loader) - group_start)
            update = (i + 1) % args.accum == 0 or i + 1 == len(loader)
            # gradients are reduced over the ranks only with the last micro batch of a group
            model.set_requires_gradient_sync((i + 1) % args.accum == 0)
            loss = F.cross_entropy(model(x), y)
            (loss / group_size).backward()
            total += loss.detach()
            if update:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.4f} loss {total.item() / world / len(loader):.5f}")
        if args.ckpt_dir and (epoch + 1) % args.ckpt_epochs == 0:
            save(os.path.join(args.ckpt_dir, f"epoch_{epoch + 1:03d}.pt"), model, optimizer, scheduler, epoch + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
