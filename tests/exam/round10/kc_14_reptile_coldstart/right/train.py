"""Reptile for cold-start recommendation: every user is a task.  The inner loop adapts the sharded weights with
plain SGD; the outer Adam takes (old weights - adapted weights) as its gradient."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

ITEM = 7


class Taste(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(ITEM, 33)
        self.second = nn.Linear(33, 33)
        self.last = nn.Linear(33, 1)

    def forward(self, x):
        return self.last(F.silu(self.second(F.silu(self.first(x)))))


def user_task(user, rows):
    """Items and ratings of one user: a personal phase and amplitude on a shared structure."""
    g = torch.Generator().manual_seed(80_000 + user)
    shared = torch.linspace(-1, 1, ITEM)
    amp = 0.5 + torch.rand((), generator=g)
    phase = torch.rand((), generator=g) * 2
    x = torch.randn(rows, ITEM, generator=g)
    y = amp * torch.sin(x @ shared + phase) + 0.05 * torch.randn(rows, generator=g)
    return x, y


def rating_loss(model, x, y):
    return F.mse_loss(model(x)[:, 0], y)


def adapt(model, x, y, lr, steps, rank, world):
    """Inner SGD on this rank's part of the user's ratings; gradients are averaged by FSDP."""
    rows = slice(rank * len(x) // world, (rank + 1) * len(x) // world)
    for _ in range(steps):
        loss = rating_loss(model, x[rows], y[rows])
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(lr * p.grad)
                p.grad = None
    return loss.detach()


@torch.no_grad()
def remember(model):
    return [p.detach().clone() for p in model.parameters()]


@torch.no_grad()
def restore(model, weights):
    for p, w in zip(model.parameters(), weights):
        p.copy_(w)


def cold_start_error(model, args, rank, world):
    """Adapt to unseen users on 16 ratings, measure on 32 others, put the weights back."""
    start = remember(model)
    errors = []
    for user in range(10_000, 10_003):
        x, y = user_task(user, 48)
        adapt(model, x[:16], y[:16], args.inner_lr, args.inner_steps, rank, world)
        with torch.no_grad():
            errors.append(rating_loss(model, x[16:], y[16:]).item())
        restore(model, start)
    return sum(errors) / len(errors)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--outer", type=int, default=18)
    ap.add_argument("--tasks", type=int, default=3)
    ap.add_argument("--inner-steps", type=int, default=4)
    ap.add_argument("--inner-lr", type=float, default=0.08)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="reptile")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(30)
    model = Taste()
    fully_shard(model, reshard_after_forward=True)  # the weights change between forwards
    outer = torch.optim.Adam(model.parameters(), lr=0.01)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(outer, T_max=args.outer)

    def state():
        m, o = get_state_dict(model, outer)
        return {"model": m, "outer": o, "sched": sched.state_dict()}

    begin = 0
    if args.resume:
        begin = max(int(d.split("=")[1]) for d in os.listdir(args.resume))
        s = state()
        dcp.load(s, checkpoint_id=os.path.join(args.resume, f"outer={begin}"))
        set_state_dict(model, outer, model_state_dict=s["model"], optim_state_dict=s["outer"])
        sched.load_state_dict(s["sched"])

    for it in range(begin, args.outer):
        old = remember(model)
        drift = [torch.zeros_like(w) for w in old]
        inner = torch.zeros(())
        for k in range(args.tasks):
            x, y = user_task(it * args.tasks + k, 16)
            inner += adapt(model, x, y, args.inner_lr, args.inner_steps, rank, world) / args.tasks
            with torch.no_grad():
                for d, w, p in zip(drift, old, model.parameters()):
                    d.add_((w - p) / args.tasks)
            restore(model, old)
        for p, d in zip(model.parameters(), drift):
            p.grad = d
        outer.step()
        outer.zero_grad()
        sched.step()

        dist.all_reduce(inner)
        if it % 6 == 5:
            error = cold_start_error(model, args, rank, world)
            if rank == 0:
                print(f"outer {it + 1} adapted loss {inner.item() / world:.5f} cold start mse {error:.5f}", flush=True)
        if args.save_every and (it + 1) % args.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(args.out, f"outer={it + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
