"""Curriculum: harder samples come in as soon as the running loss over all ranks falls below a gate."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class Gate:
    def __init__(self, levels=4, below=0.6):
        self.level, self.levels, self.below, self.running = 0, levels, below, 1.0

    def observe(self, loss):
        self.running = 0.7 * self.running + 0.3 * loss
        if self.running < self.below and self.level + 1 < self.levels:
            self.level, self.running = self.level + 1, 1.0

    def state_dict(self):
        return {"level": self.level, "running": self.running}


def draw(step, level, n):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(n, 8, generator=g)
    margin = 1.5 - 0.5 * level  # easy samples lie far from the boundary
    side = torch.randint(0, 2, (n,), generator=g)
    x[:, 0] = (2 * side - 1) * (x[:, 0].abs() + margin)
    return x, side


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="gate")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    fully_shard(net[2])
    fully_shard(net)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    gate, step = Gate(), 0
    if args.resume:
        step = max(map(int, os.listdir(args.resume)))
        m, o = get_state_dict(net, opt)
        state = {"net": m, "opt": o, "gate": gate.state_dict()}
        dcp.load(state, checkpoint_id=f"{args.resume}/{step}")
        set_state_dict(net, opt, model_state_dict=state["net"], optim_state_dict=state["opt"])
        gate.level, gate.running = state["gate"]["level"], state["gate"]["running"]
    while step < args.steps:
        x, y = (t.chunk(world)[rank] for t in draw(step, gate.level, args.batch))
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(mean := loss.detach() / world)
        gate.observe(mean.item())  # the same number on all ranks
        if rank == 0 and step % 4 == 0:
            print(f"step {step} level {gate.level} loss {mean.item():.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(net, opt)
            dcp.save({"net": m, "opt": o, "gate": gate.state_dict()}, checkpoint_id=f"{args.out}/{step}")
    sd = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
