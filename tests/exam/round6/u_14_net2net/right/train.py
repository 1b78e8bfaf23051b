"""Node classification on a random graph; the blocks of the net are widened twice while it trains (Net2Net)."""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from widen import widen

NODES, DIM, CLASSES = 240, 16, 4
PLAN = {6: 0, 12: 1}  # step -> block that is widened after it
STEPS = 18


class GraphBlock(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM)

    def forward(self, h, adj):
        return h + self.down(torch.relu(self.up(self.norm(adj @ h))))


class GraphNet(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.inp = nn.Linear(8, DIM)
        self.blocks = nn.ModuleList(GraphBlock(hidden) for _ in range(2))
        self.out = nn.Linear(DIM, CLASSES)

    def forward(self, x, adj):
        h = self.inp(x)
        for b in self.blocks:
            h = b(h, adj)
        return self.out(h)


def graph():
    g = torch.Generator().manual_seed(7)
    y = torch.randint(0, CLASSES, (NODES,), generator=g)
    p = torch.where(y[:, None] == y[None], 0.08, 0.01)
    a = (torch.rand(NODES, NODES, generator=g) < p).float()
    a = ((a + a.T + torch.eye(NODES)) > 0).float()
    x = 0.4 * F.one_hot(y, 8).float() + torch.randn(NODES, 8, generator=g)
    return x, a / a.sum(1, keepdim=True), y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    net = GraphNet()
    for b in net.blocks:
        fully_shard(b)
    fully_shard(net)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    x, adj, y = graph()
    gen = torch.Generator().manual_seed(8)

    step = 0
    if args.resume:
        step = max(int(n) for n in os.listdir(args.resume))
        folder = os.path.join(args.resume, str(step))
        with open(os.path.join(folder, "widths.json")) as f:
            widths = json.load(f)
        for i, width in enumerate(widths):
            while net.blocks[i].hidden < width:
                net.blocks[i] = widen(net.blocks[i], GraphBlock, opt)
        m, o = get_state_dict(net, opt)
        sd = {"m": m, "o": o, "gen": gen.get_state()}
        dcp.load(sd, checkpoint_id=folder)
        set_state_dict(net, opt, model_state_dict=m, optim_state_dict=o)
        gen.set_state(sd["gen"])

    while step < STEPS:
        seeds = torch.randperm(NODES, generator=gen)[:48].chunk(world)[rank]
        loss = F.cross_entropy(net(x, adj)[seeds], y[seeds])
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step in PLAN:
            i = PLAN[step]
            net.blocks[i] = widen(net.blocks[i], GraphBlock, opt)
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f} widths {[b.hidden for b in net.blocks]}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            folder = os.path.join(args.out, str(step))
            m, o = get_state_dict(net, opt)
            dcp.save({"m": m, "o": o, "gen": gen.get_state()}, checkpoint_id=folder)
            if rank == 0:
                with open(os.path.join(folder, "widths.json"), "w") as f:
                    json.dump([b.hidden for b in net.blocks], f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
