"""Multivariate forecasting with a temporal convolution network; FSDP2 with gradient accumulation."""
import argparse
import math
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from data import make_windows, micro_batches
from model import TCN

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=7)
parser.add_argument("--micro-batch", type=int, default=16, help="windows per micro batch, all ranks together")
parser.add_argument("--accumulate", type=int, default=3)
parser.add_argument("--lr", type=float, default=4e-3)
parser.add_argument("--save-epochs", type=int, default=0)
parser.add_argument("--out", default="out")
parser.add_argument("--resume")


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_windows()
    n_micro = math.ceil(len(x) / args.micro_batch)
    steps_per_epoch = math.ceil(n_micro / args.accumulate)

    torch.manual_seed(0)
    model = TCN()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=args.epochs * steps_per_epoch)

    first = 0
    if args.resume:
        path = max(pathlib.Path(args.resume).glob("epoch_*"), key=lambda p: int(p.name[6:]))
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o, "sched": sched.state_dict(), "epoch": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        sched.load_state_dict(state["sched"])
        first = state["epoch"]

    for epoch in range(first, args.epochs):
        running = torch.zeros(())
        for i, ids in enumerate(micro_batches(epoch, len(x), args.micro_batch, rank, world)):
            window_end = min((i // args.accumulate + 1) * args.accumulate, n_micro)
            window = window_end - i // args.accumulate * args.accumulate
            model.set_requires_gradient_sync((i + 1) % args.accumulate == 0)
            loss = F.mse_loss(model(x[ids]), y[ids])
            (loss / window).backward()
            running += loss.detach()
            if (i + 1) % args.accumulate == 0 or i + 1 == n_micro:
                opt.step()
                sched.step()
                opt.zero_grad()
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch + 1} loss {running.item() / n_micro / world:.5f}", flush=True)
        if args.save_epochs and (epoch + 1) % args.save_epochs == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "sched": sched.state_dict(), "epoch": epoch + 1},
                     checkpoint_id=f"{args.out}/epoch_{epoch + 1}")

    with torch.no_grad():
        xt, yt = make_windows(seed=99)
        error = F.mse_loss(model(xt), yt)
    if rank == 0:
        print(f"test mse {error.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
