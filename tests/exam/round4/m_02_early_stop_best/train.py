"""Small-data fit with early stopping; the exported file is the best model on the validation set."""
import argparse
import json
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, set_model_state_dict)
from torch.distributed.fsdp import fully_shard


class EarlyStopping:
    """Keeps the weights of the best evaluation and says when to give up."""

    def __init__(self, model, patience):
        self.model = model
        self.patience = patience
        self.best = math.inf
        self.best_step = -1
        self.best_state = None
        self.bad = 0

    def update(self, step, value):
        if value < self.best:
            self.best, self.best_step, self.bad = value, step, 0
            state = get_model_state_dict(self.model)
            self.best_state = {k: v.detach().clone() for k, v in state.items()}
        else:
            self.bad += 1
        return self.bad >= self.patience

    def restore(self):
        set_model_state_dict(self.model, self.best_state)


class Net(nn.Module):
    def __init__(self, d_in, width, classes):
        super().__init__()
        self.inp = nn.Linear(d_in, width)
        self.hid = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.cls = nn.Linear(width, classes)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        return self.cls(h + self.hid(h))


def dataset(n, d, classes, noise, seed):
    g = torch.Generator().manual_seed(seed)
    teacher = torch.randn(d, classes, generator=torch.Generator().manual_seed(99))
    x = torch.randn(n, d, generator=g)
    y = (x @ teacher).argmax(1)
    flip = torch.rand(n, generator=g) < noise
    return x, torch.where(flip, torch.randint(classes, (n,), generator=g), y)


@torch.no_grad()
def validate(model, x, y, rank, world):
    """Summed loss over this rank's share of the rows, summed over the ranks."""
    model.eval()
    xs, ys = x[rank::world], y[rank::world]
    acc = torch.stack([F.cross_entropy(model(xs), ys, reduction="sum"), torch.tensor(float(len(ys)))])
    dist.all_reduce(acc)
    model.train()
    return (acc[0] / acc[1]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=1.2e-2)
    p.add_argument("--eval-every", type=int, default=2)
    p.add_argument("--patience", type=int, default=12)
    p.add_argument("--export", default="")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = Net(16, 32, 5)
    fully_shard(model.hid)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    tx, ty = dataset(96, 16, 5, 0.35, seed=1)
    vx, vy = dataset(256, 16, 5, 0.0, seed=2)
    stopper = EarlyStopping(model, args.patience)
    order = torch.Generator().manual_seed(0)
    local = args.batch // world

    step = 0
    stop = False
    while step < args.steps and not stop:
        perm = torch.randperm(len(tx), generator=order)
        for i in range(0, len(tx), args.batch):
            idx = perm[i:i + args.batch][rank * local:(rank + 1) * local]
            loss = F.cross_entropy(model(tx[idx]), ty[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % args.eval_every == 0:
                val = validate(model, vx, vy, rank, world)
                mark = "*" if val < stopper.best else " "
                stop = stopper.update(step, val)
                log = loss.detach().clone()
                dist.all_reduce(log)
                if rank == 0:
                    print(f"step {step:3d} train {log.item() / world:.4f} val {val:.4f} {mark}", flush=True)
            if stop or step >= args.steps:
                break

    stopper.restore()
    final = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"best validation {stopper.best:.4f} at step {stopper.best_step}")
        if args.export:
            torch.save(final, args.export)
            with open(args.export + ".json", "w") as f:
                json.dump({"val_loss": stopper.best, "step": stopper.best_step}, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
