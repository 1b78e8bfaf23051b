"""Mixture-of-experts regression with loss-free load balancing (a bias on the router scores)."""

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

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class MoE(nn.Module):
    def __init__(self, width, hidden, experts, top_k):
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)
        self.register_buffer("score_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x):
        h = self.norm(x)
        score = torch.sigmoid(self.router(h))
        # the bias takes part in the choice only, never in the weight
        chosen = (score + self.score_bias).topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(score).scatter_(1, chosen, 1.0)
        if self.training:
            self.load += mask.detach().sum(0)
        gate = score * mask
        gate = gate / gate.sum(-1, keepdim=True)
        hidden = F.silu(torch.einsum("bd,edh->beh", h, self.up))
        return x + torch.einsum("beh,ehd,be->bd", hidden, self.down, gate)

    @torch.no_grad()
    def rebalance(self, rate):
        dist.all_reduce(self.load)
        self.score_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Net(nn.Module):
    def __init__(self, features=10, width=20, layers=2, experts=6):
        super().__init__()
        self.inp = nn.Linear(features, width)
        self.layers = nn.ModuleList(MoE(width, 24, experts, 2) for _ in range(layers))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x).squeeze(-1)


def make_data(n=1024):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(n, 10, generator=g)
    region = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
    w = torch.randn(4, 10, generator=g)
    y = (x * w[region]).sum(1) * 0.4 + 0.1 * torch.randn(n, generator=g)
    return x, y


def save(args, step, model, optim):
    state = {
        "step": step,
        "model": get_model_state_dict(model, options=FULL),
        "optim": get_optimizer_state_dict(model, optim, options=FULL),
    }
    if dist.get_rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        tmp = os.path.join(args.out, "tmp")
        torch.save(state, tmp)
        os.replace(tmp, os.path.join(args.out, f"moe_{step:05d}.pt"))
    dist.barrier()


def load(folder, model, optim):
    name = max(f for f in os.listdir(folder) if f.startswith("moe_"))
    state = torch.load(os.path.join(folder, name), map_location="cpu", weights_only=True)
    set_model_state_dict(model, state["model"], options=FROM_RANK0)
    set_optimizer_state_dict(model, optim, state["optim"], options=FROM_RANK0)
    return state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--bias-rate", type=float, default=0.01)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)
    start = load(args.resume, model, optim) if args.resume else 0

    x, y = make_data()
    model.train()
    for step in range(start, args.steps):
        g = torch.Generator().manual_seed(500 + step)
        rows = torch.randint(0, len(x), (args.batch,), generator=g)
        rows = rows.chunk(world)[rank]
        loss = F.smooth_l1_loss(model(x[rows]), y[rows])
        optim.zero_grad()
        loss.backward()
        optim.step()
        for layer in model.layers:
            layer.rebalance(args.bias_rate)

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            spread = max(float(layer.score_bias.abs().max()) for layer in model.layers)
            print(f"step {step:3d} loss {shown / world:.4f} largest bias {spread:.3f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            save(args, step + 1, model, optim)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
