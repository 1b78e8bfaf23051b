"""EDM-preconditioned diffusion. All randomness is a pure function of (seed, step, sample slot),
so no generator state is kept, and the checkpoint is one small file of local shards per rank."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

SIGMA_DATA = 0.5


class F_theta(nn.Module):
    def __init__(self, d=48, n=36):
        super().__init__()
        self.inp = nn.Linear(n + 1, d)
        self.body = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d)) for _ in range(2)
        )
        self.out = nn.Linear(d, n)

    def forward(self, x, c):
        h = self.inp(torch.cat([x, c[:, None]], 1))
        for b in self.body:
            h = h + b(h)
        return self.out(h)


def denoise(net, x, sigma):
    s = sigma[:, None]
    c_skip = SIGMA_DATA**2 / (s**2 + SIGMA_DATA**2)
    c_out = s * SIGMA_DATA / (s**2 + SIGMA_DATA**2).sqrt()
    c_in = 1 / (s**2 + SIGMA_DATA**2).sqrt()
    return c_skip * x + c_out * net(c_in * x, sigma.log() / 4)


def slot_noise(seed, step, slot, n):
    g = torch.Generator().manual_seed((seed * 1_000_003 + step) * 4096 + slot)
    index = torch.randint(0, n, (1,), generator=g)
    sigma = (torch.randn(1, generator=g) * 1.2 - 1.2).exp()
    return index, sigma, torch.randn(1, 36, generator=g)


def batch(data, seed, step, slots):
    parts = [slot_noise(seed, step, s, len(data)) for s in slots]
    index, sigma, eps = (torch.cat(p) for p in zip(*parts))
    return data[index], sigma, eps


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def save(folder, step, params, opt):
    path = os.path.join(folder, f"{step:06d}")
    os.makedirs(path, exist_ok=True)
    blob = {
        "step": step,
        "world": dist.get_world_size(),
        "params": [local(p).detach().clone() for p in params],
        "state": [{k: local(v).clone() for k, v in opt.state[p].items()} for p in params],
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups],
    }
    torch.save(blob, os.path.join(path, f"rank{dist.get_rank()}.pt"))
    dist.barrier()


def load(folder, params, opt):
    newest = max(os.listdir(folder))
    blob = torch.load(os.path.join(folder, newest, f"rank{dist.get_rank()}.pt"), weights_only=True)
    if blob["world"] != dist.get_world_size():
        raise SystemExit(f"checkpoint was written by {blob['world']} ranks")
    with torch.no_grad():
        for p, saved, state in zip(params, blob["params"], blob["state"]):
            local(p).copy_(saved)
            st = {}
            for k, v in state.items():
                st[k] = (
                    v
                    if v.ndim == 0
                    else DTensor.from_local(v, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
                )
            opt.state[p] = st
    for g, saved in zip(opt.param_groups, blob["groups"]):
        g.update(saved)
    return blob["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--seed", type=int, default=3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="edm")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(args.seed)
    net = F_theta()
    for b in net.body:
        fully_shard(b)
    fully_shard(net)
    params = list(net.parameters())
    opt = torch.optim.Adam(params, lr=4e-3)
    start = load(args.resume, params, opt) if args.resume else 0

    g = torch.Generator().manual_seed(0)
    basis = torch.randn(5, 36, generator=g)
    data = torch.randn(1024, 5, generator=g) @ basis
    data = data / data.std() * SIGMA_DATA

    for step in range(start, args.steps):
        x, sigma, eps = batch(data, args.seed, step, range(rank, args.batch, world))
        weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2
        total_weight = weight.sum()
        dist.all_reduce(total_weight)
        err = (denoise(net, x + sigma[:, None] * eps, sigma) - x).square().mean(1)
        loss = (weight * err).sum() / total_weight * world  # FSDP divides by world again
        loss.backward()
        opt.step()
        opt.zero_grad()
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0 and step % 2 == 1:
            print(f"step {step + 1} weighted loss {shown.item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, params, opt)

    if args.export:
        full = {k: v.full_tensor() for k, v in net.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
