"""The optimizer runs inside backward: each parameter has an optimizer of its own that steps as soon as its gradient is
reduced, so no gradient outlives the backward pass."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class InBackward:
    def __init__(self, model, make):
        self.optims = {}
        self.names = {}
        for name, p in model.named_parameters():
            self.optims[name] = make(name, p)
            self.names[p] = name
            p.register_post_accumulate_grad_hook(self._hook)
        self.fired = 0

    def _hook(self, p):
        optim = self.optims[self.names[p]]
        p.grad.clamp_(-0.5, 0.5)
        optim.step()
        optim.zero_grad(set_to_none=True)
        self.fired += 1

    def set_lr(self, factor):
        for o in self.optims.values():
            for g in o.param_groups:
                g["lr"] = g["base"] * factor

    def check(self):
        assert self.fired == len(self.optims), f"{self.fired} of {len(self.optims)} parameters were updated"
        self.fired = 0

    def state_dict(self):
        return {n: o.state_dict() for n, o in self.optims.items()}

    def load_state_dict(self, sd):
        for n, o in self.optims.items():
            o.load_state_dict(sd[n])


class Net(nn.Module):
    def __init__(self, dim=8, width=32):
        super().__init__()
        self.stem = nn.Linear(dim, width)
        self.cells = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(3)
        )
        self.head = nn.Linear(width, 2)

    def forward(self, x):
        h = self.stem(x)
        for c in self.cells:
            h = h + c(h)
        mean, log_var = self.head(h).unbind(-1)
        return mean, log_var.clamp(-4, 4)


def make_optim(name, p):
    base = 2e-3 if name.startswith("head") else 6e-3
    return torch.optim.AdamW([{"params": [p], "base": base}], lr=base, weight_decay=0.05 if p.ndim > 1 else 0.0)


def batch(step, size, rank, world):
    g = torch.Generator().manual_seed(40_000 + step)
    x = torch.rand(size, 8, generator=g) * 2 - 1
    y = torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + (0.05 + 0.3 * x[:, 3].abs()) * torch.randn(size, generator=g)
    return x[rank::world], y[rank::world]


def shard_file(folder, step, rank, world):
    return os.path.join(folder, f"s{step:06d}", f"shard-{rank}-of-{world}.pt")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(19)
    model = Net()
    for c in model.cells:
        fully_shard(c, mesh=mesh)
    fully_shard(model, mesh=mesh)
    updates = InBackward(model, make_optim)

    step = 0
    if args.resume:
        step = max(int(d[1:]) for d in os.listdir(args.resume))
        blob = torch.load(shard_file(args.resume, step, rank, world), weights_only=False)
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.to_local().copy_(blob["local"][n])
        updates.load_state_dict(blob["optim"])

    while step < args.steps:
        updates.set_lr(min(1.0, (step + 1) / 5) * 0.98**step)
        x, y = batch(step, 48, rank, world)
        mean, log_var = model(x)
        loss = F.gaussian_nll_loss(mean, y, log_var.exp())
        loss.backward()
        updates.check()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step:3d} nll {shown.item() / world:.4f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            target = shard_file(args.out, step, rank, world)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            torch.save(
                {
                    "local": {n: p.detach().to_local() for n, p in model.named_parameters()},
                    "optim": updates.state_dict(),
                },
                target,
            )
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
