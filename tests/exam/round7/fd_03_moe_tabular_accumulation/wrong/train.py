"""Tabular regression with a mixture of experts; gradients accumulate over micro batches without communication."""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard

from moe import TabularMoE
from table import CARDS, MicroBatches, make_table


def train_epoch(model, opt, batches, epoch, accum, rank):
    n = len(batches)
    total, steps = torch.zeros(()), 0
    for i, (num, cat, y) in enumerate(batches.epoch(epoch)):
        window = min(accum, n - i // accum * accum)     # the last window of an epoch may be short
        last = (i + 1) % accum == 0 or i + 1 == n
        model.set_requires_gradient_sync((i + 1) % accum == 0)
        loss = (model(num, cat).squeeze(-1) - y).square().mean()
        (loss / window).backward()
        total += loss.detach()
        if last:
            opt.step()
            opt.zero_grad()
            steps += 1
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: {steps} updates, loss {total.item() / n / dist.get_world_size():.4f}")


@torch.no_grad()
def validate(model, table, rank, world):
    num, cat, y = [c[rank::world] for c in table]
    s = (model(num, cat).squeeze(-1) - y).square().sum()
    dist.all_reduce(s)
    return s.item() / len(table[2])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--accum", type=int, default=4)
    p.add_argument("--lr", type=float, default=0.01)
    p.add_argument("--save-epochs", type=int, default=0)
    p.add_argument("--dir", default=None)
    p.add_argument("--resume", default=None)
    p.add_argument("--weights", default=None)
    a = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    model = TabularMoE(6, CARDS)
    for layer in model.layers:
        for e in layer.experts:
            fully_shard(e)
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=a.lr, momentum=0.9)
    batches = MicroBatches(make_table(608, 1), 32, rank, world)
    valid = make_table(512, 2)

    first = 0
    if a.resume:
        path = max(glob.glob(os.path.join(a.resume, "epoch*")), key=lambda s: int(s.rsplit("epoch", 1)[1]))
        m, o = get_state_dict(model, opt)
        st = {"model": m, "optim": o, "epoch": 0}
        dcp.load(st, checkpoint_id=path)
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["optim"])
        first = st["epoch"]

    for epoch in range(first, a.epochs):
        train_epoch(model, opt, batches, epoch, a.accum, rank)
        if a.save_epochs and (epoch + 1) % a.save_epochs == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "epoch": epoch + 1}, checkpoint_id=f"{a.dir}/epoch{epoch + 1}")
    mse = validate(model, valid, rank, world)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"validation MSE {mse:.4f}")
        if a.weights:
            torch.save(full, a.weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
