"""Node regression on many small mesh graphs (heat conduction), of which only some nodes carry a sensor.

Graphs differ in size and are packed onto the ranks by size, so ranks hold different numbers of sensors, now and then
none. The loss is a sum over sensors divided by their number in the whole batch, and gradients are added up over ranks."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

GRAPHS, BATCH, STEPS, WIDTH = 60, 6, 45, 24


def make_graph(k):
    g = torch.Generator().manual_seed(7000 + k)
    n = int(torch.randint(4, 20, (1,), generator=g))
    near = (torch.rand(n, n, generator=g) < 0.25).float().triu(1)
    ring = torch.eye(n).roll(1, 0)
    adj = ((near + near.t() + ring + ring.t()) > 0).float().fill_diagonal_(0.0)
    smooth = adj / adj.sum(1, keepdim=True)
    source = torch.randn(n, 3, generator=g)
    heat = source[:, :1] + 0.5 * source[:, 1:2] * source[:, 2:]
    for _ in range(2):
        heat = 0.5 * heat + 0.5 * smooth @ heat
    # some graphs have no sensor at all
    sensor = (torch.rand(n, generator=g) < 0.4) & (k % 3 != 0)
    return source, smooth, 2 * heat, sensor


def pack(graphs, ids, world):
    """largest first onto the emptiest rank"""
    bins, load = [[] for _ in range(world)], [0] * world
    for k in sorted(ids, key=lambda k: (-len(graphs[k][0]), k)):
        r = load.index(min(load))
        bins[r].append(k)
        load[r] += len(graphs[k][0])
    return bins


def collate(graphs):
    x, s, y, m = zip(*graphs)
    return torch.cat(x), torch.block_diag(*s), torch.cat(y), torch.cat(m)


class MeshNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(3, WIDTH)
        self.hops = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x, smooth):
        h = torch.tanh(self.inp(x))
        for hop in self.hops:
            h = h + torch.tanh(hop(torch.cat([h, smooth @ h], 1)))
        return self.out(h)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=10)
    ap.add_argument("--resume")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(23)
    model = fully_shard(MeshNet(), mesh=init_device_mesh("cpu", (world,)))
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    opt = torch.optim.RAdam(model.parameters(), lr=1e-2)

    step = 0
    if a.resume:
        step = max(int(d.removeprefix("step")) for d in os.listdir(a.resume))
        m, o = get_state_dict(model, opt)
        dcp.load({"model": m, "opt": o}, checkpoint_id=f"{a.resume}/step{step}")
        set_state_dict(model, opt, model_state_dict=m, optim_state_dict=o)

    graphs = [make_graph(k) for k in range(GRAPHS)]
    history = []
    while step < STEPS:
        ids = torch.randperm(GRAPHS, generator=torch.Generator().manual_seed(step))[:BATCH].tolist()
        x, smooth, y, sensor = collate([graphs[k] for k in pack(graphs, ids, world)[rank]])
        sensors = sensor.sum()
        dist.all_reduce(sensors)
        error = (model(x, smooth) - y).square()[:, 0]
        loss = torch.where(sensor, error, 0.0).sum() / sensors.clamp_min(1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        total = loss.detach()
        dist.all_reduce(total)
        history.append(total.item())
        if rank == 0 and step % 5 == 0:
            recent = history[-5:]
            print(f"step {step} loss {sum(recent) / len(recent):.4f}", flush=True)
        if a.out and step % a.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o}, checkpoint_id=f"{a.out}/step{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
