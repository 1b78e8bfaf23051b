"""Small MoE language model with loss-free load balancing: a bias per expert, moved after every step
towards equal load, is added to the router scores for the choice of experts only."""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ = 40, 24


class Experts(nn.Module):
    def __init__(self, dim, hidden, n_experts, top_k):
        super().__init__()
        self.top_k, self.n = top_k, n_experts
        self.router = nn.Linear(dim, n_experts, bias=False)
        self.w_in = nn.Parameter(torch.randn(n_experts, dim, hidden) * dim**-0.5)
        self.w_out = nn.Parameter(torch.randn(n_experts, hidden, dim) * hidden**-0.5)
        self.register_buffer("balance_bias", torch.zeros(n_experts))
        self.register_buffer("load", torch.zeros(n_experts), persistent=False)

    def forward(self, x):
        score = torch.sigmoid(self.router(x))
        chosen = (score.detach() + self.balance_bias).topk(self.top_k, dim=-1).indices
        mask = F.one_hot(chosen, self.n).sum(-2).to(x.dtype)
        if self.training:
            self.load += mask.flatten(0, -2).sum(0)
        gate = score * mask
        gate = gate / gate.sum(-1, keepdim=True)
        h = F.silu(torch.einsum("btd,edh->bteh", x, self.w_in))
        return torch.einsum("bteh,ehd,bte->btd", h, self.w_out, gate)

    @torch.no_grad()
    def update_bias(self, speed):
        load = self.load.clone()
        self.balance_bias += speed * torch.sign(load.mean() - load)
        self.load.zero_()
        return load


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.moe = Experts(dim, 2 * dim, n_experts=6, top_k=2)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.moe(self.n2(x))


class MoELM(nn.Module):
    def __init__(self, dim=16, depth=2):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(torch.randn(SEQ, dim) * 0.1)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        x = self.emb(ids) + self.pos
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def make_batch(step, n):
    g = torch.Generator().manual_seed(100 + step)
    start = torch.randint(VOCAB, (n, 1), generator=g)
    stride = torch.randint(1, 6, (n, 1), generator=g)
    return (start + stride * torch.arange(SEQ + 1)) % VOCAB


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=32)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--bias-speed", type=float, default=0.01)
    p.add_argument("--out")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = MoELM()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))

    start = 0
    if args.resume:
        start = max(int(m.group(1)) for m in (re.fullmatch(r"it(\d+)", d) for d in os.listdir(args.resume)) if m)
        sd = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, f"it{start:04d}"))
        set_model_state_dict(model, sd["model"])
        set_optimizer_state_dict(model, opt, sd["opt"])

    lo, hi = rank * args.batch // world, (rank + 1) * args.batch // world
    for step in range(start, args.steps):
        rows = make_batch(step, args.batch)[lo:hi]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        loads = [b.moe.update_bias(args.bias_speed) for b in model.blocks]
        avg = loss.detach().clone()
        dist.all_reduce(avg)
        if rank == 0 and step % 4 == 3:
            spread = max((l.max() / l.mean()).item() for l in loads)
            print(f"step {step + 1} loss {avg.item() / world:.4f} worst expert load {spread:.2f}x", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            sd = {"model": get_model_state_dict(model), "opt": get_optimizer_state_dict(model, opt)}
            dcp.save(sd, checkpoint_id=os.path.join(args.out, f"it{step + 1:04d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
