"""Rotation prediction (self-supervised) on small images with LARS."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer


class LARS(Optimizer):
    """Momentum SGD; matrices and filters get a step in proportion to ||w|| / ||g|| of the layer."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4, trust=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["buf"] = torch.zeros_like(p)
                w, g, buf = p.detach().to_local(), p.grad.to_local(), state["buf"].to_local()
                scale = 1.0
                if p.ndim > 1:
                    w_norm, g_norm = w.norm(), g.norm()
                    scale = group["trust"] * w_norm / (g_norm + group["weight_decay"] * w_norm + 1e-9)
                buf.mul_(group["momentum"]).add_(scale * (g + group["weight_decay"] * w))
                w.sub_(group["lr"] * buf)


class ConvNet(nn.Module):
    def __init__(self, w=16):
        super().__init__()
        self.f1 = nn.Sequential(nn.Conv2d(1, w, 3, 2, 1), nn.GroupNorm(4, w), nn.ReLU())
        self.f2 = nn.Sequential(nn.Conv2d(w, 2 * w, 3, 2, 1), nn.GroupNorm(4, 2 * w), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(8 * w, 2 * w), nn.ReLU(), nn.Linear(2 * w, 4))

    def forward(self, x):
        return self.head(self.f2(self.f1(x)).flatten(1))


def rotated(step, n):
    g = torch.Generator().manual_seed(step + 40)
    ramp = torch.linspace(-1, 1, 8)
    slope = 0.5 + torch.rand(n, 1, 1, generator=g)
    img = slope * ramp[None, :, None] + 0.5 * torch.sin(6 * torch.rand(n, 1, 1, generator=g) + 3 * ramp)
    img = (img + 0.3 * torch.randn(n, 8, 8, generator=g)).unsqueeze(1)
    turn = torch.randint(4, (n,), generator=g)
    return torch.stack([torch.rot90(i, int(k), (1, 2)) for i, k in zip(img, turn)]), turn


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--lr", type=float, default=0.6)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="lars_out")
    ap.add_argument("--resume", default="")
    cli = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    net = ConvNet()
    for part in (net.f1, net.f2, net.head):
        fully_shard(part)
    fully_shard(net)
    opt = LARS(net.parameters(), lr=cli.lr)
    step = 0
    if cli.resume:
        step = max(int(d[1:]) for d in os.listdir(cli.resume) if d[0] == "s")
        for p in net.parameters():
            opt.state[p]["buf"] = torch.zeros_like(p)
        m, o = get_state_dict(net, opt)
        dcp.load({"net": m, "opt": o}, checkpoint_id=f"{cli.resume}/s{step}")
        set_state_dict(net, opt, model_state_dict=m, optim_state_dict=o)
    while step < cli.steps:
        for group in opt.param_groups:
            group["lr"] = cli.lr * min(1.0, (step + 1) / 6)
        x, turn = (t.chunk(world)[rank] for t in rotated(step, 32))
        loss = F.cross_entropy(net(x), turn)
        net.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        value = loss.detach().clone()
        dist.all_reduce(value)
        if rank == 0 and step % 4 == 0:
            print(f"{step} loss {value.item() / world:.5f}")
        if cli.save_every and step % cli.save_every == 0:
            m, o = get_state_dict(net, opt)
            dcp.save({"net": m, "opt": o}, checkpoint_id=f"{cli.out}/s{step}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
