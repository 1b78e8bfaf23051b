"""DDPM on a two-dimensional toy distribution, with a preview of samples now and then."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

T = 50
BETA = torch.linspace(1e-3, 0.15, T)
ABAR = torch.cumprod(1 - BETA, 0)


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.fc, self.time = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, t):
        return x + F.silu(self.fc(self.norm(x)) + self.time(t))


class Denoiser(nn.Module):
    def __init__(self, d=32, depth=3):
        super().__init__()
        self.inp, self.emb, self.out = nn.Linear(2, d), nn.Embedding(T, d), nn.Linear(d, 2)
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))

    def forward(self, x, t):
        h, e = self.inp(x), self.emb(t)
        for layer in self.layers:
            h = layer(h, e)
        return self.out(h)


def dataset(n=1024):
    g = torch.Generator().manual_seed(99)
    a = 6.2832 * torch.rand(n, generator=g)
    ring = torch.stack([a.cos(), a.sin()], 1) * torch.where(torch.rand(n, 1, generator=g) < 0.5, 0.5, 1.5)
    return ring + 0.05 * torch.randn(n, 2, generator=g)


@torch.no_grad()
def preview(model, n, seed):
    """Ancestral sampling from a fixed start, so that previews can be compared."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        x = torch.randn(n, 2)
        for t in reversed(range(T)):
            eps = model(x, torch.full((n,), t))
            x = (x - BETA[t] / (1 - ABAR[t]).sqrt() * eps) / (1 - BETA[t]).sqrt()
            if t:
                x = x + BETA[t].sqrt() * torch.randn(n, 2)
    return x.norm(dim=1)


def pack(model, opt, step):
    m, o = get_state_dict(model, opt)
    return {"model": m, "opt": o, "step": step, "rng": torch.get_rng_state()}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--preview-every", type=int, default=4)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Denoiser()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    start = 0
    if args.resume:
        state = pack(model, opt, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        torch.set_rng_state(state["rng"])
        start = state["step"]

    data = dataset()
    mine = slice(rank * args.batch // world, (rank + 1) * args.batch // world)
    for step in range(start, args.steps):
        x0 = data[torch.randint(0, len(data), (args.batch,))][mine]
        t = torch.randint(0, T, (args.batch,))[mine]
        eps = torch.randn(args.batch, 2)[mine]
        a = ABAR[t][:, None]
        loss = F.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * eps, t), eps)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if args.preview_every and (step + 1) % args.preview_every == 0:
            radius = preview(model, 32, seed=1234)
            log = loss.detach() / world
            dist.all_reduce(log)
            if rank == 0:
                print(f"step {step + 1} loss {log.item():.4f} sample radius {radius.mean():.3f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(pack(model, opt, step + 1), checkpoint_id=os.path.join(args.out, f"{step + 1:05d}"))
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
