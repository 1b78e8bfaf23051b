"""Fit of a small controller for a pendulum, by forward passes only. The loss is the cost of simulated swings; the
simulator calls the sharded network at every time step."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, set_model_state_dict)
from torch.distributed.fsdp import fully_shard

from zeroth_order import ZerothOrder


class Controller(nn.Module):
    def __init__(self, d=12):
        super().__init__()
        self.l1, self.l2 = nn.Linear(3, d), nn.Linear(d, d)
        self.out = nn.Linear(d, 1)

    def forward(self, s):
        return 2 * torch.tanh(self.out(torch.tanh(self.l2(torch.tanh(self.l1(s))))))


@torch.no_grad()
def swing_cost(model, angle, speed, horizon=8, dt=0.1):
    """Mean cost over the swings of all ranks."""
    cost = torch.zeros_like(angle)
    for _ in range(horizon):
        u = model(torch.stack([angle.cos(), angle.sin(), speed], -1)).squeeze(-1)
        speed = speed + dt * (2.0 * angle.sin() + u)
        angle = angle + dt * speed
        cost = cost + angle.square() + 0.1 * speed.square() + 0.01 * u.square()
    total = cost.mean()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.004)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--out")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    # differences of losses need the digits
    model = Controller().double()
    # resharding also after the root's forward, since no backward will do it and the shards are written to in between
    fully_shard(model, reshard_after_forward=True)
    zo = ZerothOrder(model, lr=a.lr)
    # the starting states of the swings, the same set in every step
    g = torch.Generator().manual_seed(30)
    angle = 0.8 * torch.randn(64, generator=g, dtype=torch.float64)
    speed = 0.5 * torch.randn(64, generator=g, dtype=torch.float64)
    mine = angle.chunk(world)[rank], speed.chunk(world)[rank]
    g = torch.Generator().manual_seed(31)
    step = 0

    if a.resume:
        step = max(int(n[4:]) for n in os.listdir(a.resume) if n.startswith("step"))
        folder = os.path.join(a.resume, f"step{step}")
        sd = {"model": get_model_state_dict(model), "rng": g.get_state()}
        dcp.load(sd, checkpoint_id=os.path.join(folder, "tensors"))
        set_model_state_dict(model, sd["model"])
        g.set_state(sd["rng"])
        with open(os.path.join(folder, "optimizer.json")) as f:
            zo.load_state_dict(json.load(f))

    while step < a.steps:
        seeds = torch.randint(0, 2 ** 40, (zo.n,), generator=g).tolist()
        cost = zo.step(lambda: swing_cost(model, *mine), seeds)
        step += 1
        if rank == 0 and step % 2 == 0:
            print(f"step {step} cost {cost:.5f} directions kept {len(zo.past)}")
        if a.save_every and step % a.save_every == 0 and step < a.steps:
            folder = os.path.join(a.ckpt, f"step{step}")
            dcp.save({"model": get_model_state_dict(model), "rng": g.get_state()},
                     checkpoint_id=os.path.join(folder, "tensors"))
            if rank == 0:
                with open(os.path.join(folder, "optimizer.json"), "w") as f:
                    json.dump(zo.state_dict(), f)
            dist.barrier()

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and a.out:
        torch.save(full, a.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
