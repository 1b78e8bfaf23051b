"""Regression on four files of measurements; each rank reads its own files, or a part of one."""
import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

FILES = ["north", "east", "south", "west"]
ROWS, COLUMNS, TAKE = 240, 12, 8  # of a file; TAKE rows of each file make a step


def read(name, epoch):
    """A file as the stations write it: from the second day on with two more columns."""
    g = torch.Generator().manual_seed(FILES.index(name) * 100 + epoch)
    x = torch.randn(ROWS, COLUMNS + 2 * (epoch > 0), generator=g)
    y = x[:, 0] * x[:, 1] + torch.sin(2 * x[:, 2]) + 0.3 * FILES.index(name) * x[:, 3]
    return x[:, :COLUMNS], y


def owned(rank, world):
    """(file, part, parts) for each file that a rank reads from."""
    if world <= len(FILES):
        return [(name, 0, 1) for name in FILES[rank::world]]
    at = rank % len(FILES)
    sharing = range(at, world, len(FILES))
    return [(FILES[at], sharing.index(rank), len(sharing))]


def steps_of(epoch, rank, world):
    mine = [(read(name, epoch), part, parts) for name, part, parts in owned(rank, world)]
    for first in range(0, ROWS, TAKE):
        taken = [
            (x[first + part : first + TAKE : parts], y[first + part : first + TAKE : parts])
            for (x, y), part, parts in mine
        ]
        yield torch.cat([x for x, _ in taken]), torch.cat([y for _, y in taken])


def network(width=40):
    torch.manual_seed(9)
    layers = [nn.Linear(COLUMNS, width), nn.SiLU()]
    for _ in range(2):
        layers += [nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()]
    model = nn.Sequential(*layers, nn.Linear(width, 1))
    for layer in model:
        if isinstance(layer, nn.Linear) and layer.out_features == width:
            fully_shard(layer)
    return fully_shard(model)


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    done = 0

    def state():
        weights, optim = get_state_dict(model, optimizer)
        return {"weights": weights, "optim": optim, "done": done}

    if args.resume:
        saved = state()
        dcp.load(saved, checkpoint_id=str(max(Path(args.resume).iterdir())))
        set_state_dict(
            model, optimizer, model_state_dict=saved["weights"], optim_state_dict=saved["optim"]
        )
        done = saved["done"]

    step = 0
    for epoch in range(args.epochs):
        for x, y in steps_of(epoch, rank, world):
            step += 1
            if step <= done:
                continue
            # a rank may hold more rows than another: the sum over all rows, divided once
            error = F.mse_loss(model(x).squeeze(1), y, reduction="sum")
            loss = error * world / (TAKE * len(FILES))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            optimizer.step()
            optimizer.zero_grad()
            done = step
            if step % 15 == 0:
                error = error.detach()
                dist.all_reduce(error)
                if rank == 0:
                    print(f"step {step} error {error.item() / TAKE / len(FILES):.5f}", flush=True)
            if step == args.save_at:
                dcp.save(state(), checkpoint_id=str(Path(args.out) / f"step{step:04d}"))


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=0.03)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    try:
        run(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
