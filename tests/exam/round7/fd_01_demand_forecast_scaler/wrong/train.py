"""Global demand forecaster, FSDP2."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard

from data import DemandData, windows
from model import Forecaster

CONTEXT, HORIZON = 28, 7


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", type=Path, default=None)
    p.add_argument("--resume", type=Path, default=None)
    p.add_argument("--export", type=Path, default=None)
    return p.parse_args()


def newest(folder):
    return max(folder.glob("step_*"), key=lambda d: int(d.name.split("_")[1]))


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = DemandData()
    series = data.shard(rank, world)

    torch.manual_seed(0)
    model = Forecaster(CONTEXT, HORIZON)
    model.scaler.fit(series)
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)

    step = 0
    if args.resume:
        msd, osd = get_state_dict(model, opt)
        state = {"model": msd, "optim": osd, "step": 0}
        dcp.load(state, checkpoint_id=newest(args.resume))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        step = state["step"]

    while step < args.steps:
        x, y = windows(series, step, 1000, CONTEXT, HORIZON)
        pred = model(x)
        loss = F.smooth_l1_loss(pred, model.scaler(y))
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1

        if step % 10 == 0:
            l = loss.detach().clone()
            dist.all_reduce(l)
            if rank == 0:
                print(f"step {step} loss {l.item() / world:.5f}")
        if args.save_every and step % args.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save({"model": msd, "optim": osd, "step": step}, checkpoint_id=args.out / f"step_{step}")

    # hold-out: the last days of all series, in units sold
    x = data.values[:, -CONTEXT - HORIZON:-HORIZON]
    y = data.values[:, -HORIZON:]
    with torch.no_grad():
        mae = (model.scaler.inverse(model(x)) - y).abs().mean()
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"holdout MAE {mae.item():.4f}")
        if args.export:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
