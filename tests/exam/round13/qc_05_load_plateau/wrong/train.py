import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nbeats import Forecaster
from series import HISTORY, HORIZON, REGIONS, make_windows, split


@torch.no_grad()
def validate(model, regions):
    """Sum of squared errors and number of values over the regions of this rank."""
    total = torch.zeros(2)
    for w in regions:
        x, y = split(w)
        total += torch.tensor([(model(x) - y).square().sum(), float(y.numel())])
    return total


def checkpoint_state(model, optim, plateau, step):
    m, o = get_state_dict(model, optim)
    return {"model": m, "optim": o, "plateau": plateau.state_dict(), "step": step}


def main():
    ap = argparse.ArgumentParser(description="Day-ahead load forecasting")
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--validate-every", type=int, default=3)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(8)
    model = Forecaster(HISTORY, HORIZON)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optim = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    plateau = ReduceLROnPlateau(optim, factor=0.5, patience=0, threshold=0.02)
    train, valid = make_windows()
    mine = range(rank * REGIONS // world, (rank + 1) * REGIONS // world)
    train, valid = [train[r] for r in mine], [valid[r] for r in mine]

    step = 0
    if args.resume:
        state = checkpoint_state(model, optim, plateau, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, "last"))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        plateau.load_state_dict(state["plateau"])
        step = state["step"]

    while step < args.steps:
        pick = torch.randint(len(train[0]), (8,), generator=torch.Generator().manual_seed(step))
        x, y = split(torch.cat([w[pick] for w in train]))
        loss = (model(x) - y).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        step += 1
        if step % args.validate_every == 0:
            local = validate(model, valid)
            total = local.clone()
            dist.all_reduce(total)
            plateau.step((local[0] / local[1]).item())
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.6f} valid mse {(total[0] / total[1]).item():.6f} "
                      f"lr {optim.param_groups[0]['lr']:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(checkpoint_state(model, optim, plateau, step), checkpoint_id=os.path.join(args.out, "last"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
