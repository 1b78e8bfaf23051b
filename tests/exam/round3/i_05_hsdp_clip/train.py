"""HSDP (replicate x shard) with our own fused clip: norm and scaling over the local shards in one pass."""

import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def hsdp_mesh(world):
    replicas = 2 if world % 2 == 0 else 1
    return init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))


class Mixer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.Linear(tokens, tokens)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.mix(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ff(self.n2(x))


class Net(nn.Module):
    def __init__(self, feat=5, tokens=8, dim=16, depth=2):
        super().__init__()
        self.inp = nn.Linear(feat, dim)
        self.blocks = nn.ModuleList(Mixer(tokens, dim) for _ in range(depth))
        self.out = nn.Linear(dim, 1)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.out(x.mean(1))


@torch.no_grad()
def fused_clip_(params, max_norm, mesh):
    grads = [p.grad.to_local() for p in params if p.grad is not None]
    square = torch.stack([g.float().pow(2).sum() for g in grads]).sum()
    dist.all_reduce(square, group=mesh["shard"].get_group())
    norm = square.sqrt()
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0).item())
    return norm.item()


def make_data(n=640):
    g = torch.Generator().manual_seed(23)
    x = torch.randn(n, 8, 5, generator=g)
    y = 2 * torch.sin(x[:, 0, 0]) + x[:, 3, 1] * x[:, 5, 2] + x[:, :, 4].sum(1)
    return x, y


def save(path, model, optim, step):
    os.makedirs(path, exist_ok=True)
    blob = {"model": model.state_dict(), "optim": optim.state_dict(), "step": step}
    torch.save(blob, os.path.join(path, f"step{step:05d}.rank{dist.get_rank()}.pt"))
    dist.barrier()


def restore(path, model, optim):
    mine = sorted(glob.glob(os.path.join(path, f"*.rank{dist.get_rank()}.pt")))[-1]
    blob = torch.load(mine, weights_only=False)
    model.load_state_dict(blob["model"])
    optim.load_state_dict(blob["optim"])
    return blob["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--max-norm", type=float, default=1.0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = hsdp_mesh(world)
    torch.manual_seed(8)
    model = Net()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    params = list(model.parameters())
    optim = torch.optim.SGD(params, lr=0.03, momentum=0.9, nesterov=True)

    step = restore(args.resume, model, optim) if args.resume else 0
    x, y = make_data()
    while step < args.steps:
        g = torch.Generator().manual_seed(10_000 + step)
        ids = torch.randint(len(x), (args.batch,), generator=g).chunk(world)[rank]
        loss = F.mse_loss(model(x[ids]).squeeze(-1), y[ids])
        loss.backward()
        norm = fused_clip_(params, args.max_norm, mesh)
        optim.step()
        optim.zero_grad()
        step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 3 == 0:
            print(f"{step:4d} | loss {mean.item() / world:8.4f} | grad norm {norm:7.3f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            save(args.out, model, optim, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
