import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from data import Prices
from model import PriceModel
from rates import PlateauRate
from validation import over_ranks, squared_errors


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=36)
    p.add_argument("--validate-every", type=int, default=3)
    p.add_argument("--lr", type=float, default=0.015)
    p.add_argument("--out", default="")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume", default="")
    return p.parse_args()


def bundle(model, optimizer, rate, step):
    m, o = get_state_dict(model, optimizer)
    return {"model": m, "optimizer": o, "rate": rate.state_dict(), "step": step}


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = PriceModel()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=1e-5, weight_decay=0.01)
    rate = PlateauRate(optimizer)
    data = Prices(rank, world)

    step = 0
    if args.resume:
        state = bundle(model, optimizer, rate, step)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        rate.load_state_dict(state["rate"])
        step = state["step"]

    window = torch.zeros(())
    while step < args.steps:
        x, y = data.train_batch(step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        window += loss.detach()
        step += 1
        if step % args.validate_every == 0:
            sums = squared_errors(model, data.valid)
            total = over_ranks(sums)
            valid = (total[0] / total[1]).item()
            rate.observe((sums[0] / sums[1]).item())
            train = over_ranks(window).item() / world / args.validate_every
            window.zero_()
            if rank == 0:
                print(f"{step:3d} train {train:.5f} valid {valid:.5f} cuts {rate.cuts}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(bundle(model, optimizer, rate, step), checkpoint_id=os.path.join(args.out, f"{step:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
