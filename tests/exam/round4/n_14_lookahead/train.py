"""Fuel-consumption regression with a home-made Lookahead(Adam); the slow weights live in the optimizer state."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class LookaheadAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), k=5, alpha=0.5):
        super().__init__(params, dict(lr=lr, betas=betas, k=k, alpha=alpha))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                if not st:
                    st["step"] = torch.zeros(())
                    st["m"], st["v"] = torch.zeros_like(p), torch.zeros_like(p)
                    st["slow"] = p.detach().clone()
                st["step"] += 1
                t = int(st["step"])
                st["m"].lerp_(p.grad, 1 - b1)
                st["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                denom = (st["v"] / (1 - b2**t)).sqrt_().add_(1e-8)
                p.addcdiv_(st["m"], denom, value=-group["lr"] / (1 - b1**t))
                if t % group["k"] == 0:
                    st["slow"].lerp_(p, group["alpha"])
                    p.copy_(st["slow"])


def cars(n=640, seed=15):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    y = 8 + 1.5 * x[:, 0] + x[:, 1].abs() * x[:, 2] - 0.7 * torch.relu(x[:, 3]) + 0.2 * torch.randn(n, generator=g)
    return x, y


def build(width=32):
    def block():
        return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    class Res(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(6, width)
            self.body = nn.ModuleList(block() for _ in range(2))
            self.head = nn.Linear(width, 1)

        def forward(self, x):
            h = self.stem(x)
            for b in self.body:
                h = h + b(h)
            return self.head(h).squeeze(-1)

    return Res()


def huber_sum(pred, y):
    return F.huber_loss(pred, y, reduction="sum")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--micro", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/look")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    x, y = cars()
    model = build()
    with torch.no_grad():
        model.head.bias.fill_(y.mean())
    mesh = init_device_mesh("cpu", (world,))
    for b in model.body:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = LookaheadAdam(model.parameters())

    step = 0
    if args.resume:
        # the optimizer makes its state in the first step, so take one that is overwritten by the checkpoint
        model(x[:2]).sum().mul(0.0).backward()
        opt.step()
        opt.zero_grad()
        m, o = get_state_dict(model, opt)
        sd = {"model": m, "opt": o, "step": 0}
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        step = sd["step"]

    while step < args.steps:
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(step // 10))
        batch = order[(step % 10) * args.batch:][:args.batch]
        shown = torch.zeros(())
        for i, rows in enumerate(batch.chunk(world)[rank].chunk(args.micro)):
            model.set_requires_gradient_sync(i + 1 == args.micro)
            loss = huber_sum(model(x[rows]), y[rows]) * world / args.batch
            loss.backward()
            shown += loss.detach()
        opt.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} huber {shown.item() / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "step": step}, checkpoint_id=os.path.join(args.out, f"look{step:05d}"))

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
