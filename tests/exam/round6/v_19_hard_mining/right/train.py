"""Graph classification with hard example mining on a pool, a small message passing network and FSDP2."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from mining import HardestOfPool

NODES, FEATURES = 8, 4


class MessageLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.own = nn.Linear(dim, dim)
        self.other = nn.Linear(dim, dim, bias=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, h, adj):
        degree = adj.sum(-1, keepdim=True).clamp(min=1)
        return self.norm(h + torch.relu(self.own(h) + adj @ self.other(h) / degree))


class GraphNet(nn.Module):
    def __init__(self, dim=24, depth=2):
        super().__init__()
        self.inp = nn.Linear(FEATURES, dim)
        self.layers = nn.ModuleList(MessageLayer(dim) for _ in range(depth))
        self.head = nn.Linear(dim, 2, bias=False)

    def forward(self, x, adj):
        h = self.inp(x)
        for layer in self.layers:
            h = layer(h, adj)
        return self.head(h.mean(1))


def graphs(n, generator):
    x = torch.randn(n, NODES, FEATURES, generator=generator)
    adj = (torch.rand(n, NODES, NODES, generator=generator) < 0.3).float()
    adj = torch.triu(adj, 1)
    adj = adj + adj.transpose(1, 2)
    label = ((adj @ x)[..., 0] * x[..., 1]).sum(1) + x[..., 2].sum(1) > 0
    flip = torch.rand(n, generator=generator) < 0.02
    return x, adj, (label ^ flip).long()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--pool", type=int, default=96)
    ap.add_argument("--keep", type=int, default=32)
    ap.add_argument("--mine-after", type=int, default=6, help="plain random batches before")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="graphs")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(44)
    model = GraphNet()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=3e-3, momentum=0.5)
    generator = torch.Generator().manual_seed(45)
    miner = HardestOfPool(args.keep, skip_top=0.03)
    full_options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    step = 0
    if args.resume:
        # rank 0 reads, the weights and moments are broadcast to the others
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        saved = [{"model": {}, "opt": {}}]
        small = [None]
        if rank == 0:
            newest = sorted(os.listdir(args.resume))[-1]
            saved = [torch.load(os.path.join(args.resume, newest))]
            small = [saved[0]["small"]]
        dist.broadcast_object_list(small)
        set_model_state_dict(model, saved[0]["model"], options=options)
        set_optimizer_state_dict(model, opt, saved[0]["opt"], options=options)
        step = small[0]["step"]
        miner.history = small[0]["history"]
        generator.set_state(small[0]["generator"])

    def score(x, adj, label):
        return F.cross_entropy(model(x, adj), label, reduction="none")

    while step < args.steps:
        if step < args.mine_after:
            n = args.keep // world
            x, adj, label = (t[rank * n : (rank + 1) * n] for t in graphs(args.keep, generator))
        else:
            x, adj, label = miner.pick(score, graphs(args.pool, generator), rank, world)
        loss = score(x, adj, label).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            pool_loss = miner.history.mean().item() if len(miner.history) else float(shown)
            print(f"step {step} loss {shown:.5f} pool {pool_loss:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            content = {
                "model": get_model_state_dict(model, options=full_options),
                "opt": get_optimizer_state_dict(model, opt, options=full_options),
                "small": {"step": step, "history": miner.history, "generator": generator.get_state()},
            }
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save(content, os.path.join(args.out, f"graph-{step:05d}.pt"))
            dist.barrier()

    if args.export:
        full = get_model_state_dict(model, options=full_options)
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
