"""SimCLR on small images with negatives from all ranks.

Each rank sums the loss of its own rows and divides by the rows of all ranks, so gradients are added over ranks.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class AllRows(torch.autograd.Function):
    """Concatenate rows over ranks; a row's gradient is the sum of what every rank's loss says about it."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        lo = dist.get_rank() * ctx.rows
        return grad[lo:lo + ctx.rows]


class Encoder(nn.Module):
    def __init__(self, width=16, proj=12):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.GroupNorm(4, width), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(4, 2 * width), nn.ReLU())
        self.proj = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Linear(2 * width, proj))

    def forward(self, x):
        return F.normalize(self.proj(self.body(self.stem(x)).mean((2, 3))), dim=1)


class App(Stateful):
    def __init__(self, net, opt):
        self.net, self.opt, self.step = net, opt, 0

    def state_dict(self):
        n, o = get_state_dict(self.net, self.opt)
        return {"net": n, "opt": o, "step": self.step}

    def load_state_dict(self, s):
        set_state_dict(self.net, self.opt, model_state_dict=s["net"], optim_state_dict=s["opt"])
        self.step = s["step"]


def two_views(step, batch):
    g = torch.Generator().manual_seed(step)
    base = torch.randn(batch, 3, 4, 4, generator=g)
    image = F.interpolate(base, size=8, mode="bilinear", align_corners=False)
    views = []
    for _ in range(2):
        flip = torch.rand(batch, 1, 1, 1, generator=g) < 0.5
        gain = 0.7 + 0.6 * torch.rand(batch, 3, 1, 1, generator=g)
        views.append(torch.where(flip, image.flip(3), image) * gain + 0.1 * torch.randn(batch, 3, 8, 8, generator=g))
    return views


def nt_xent(za, zb, tau=0.2):
    rank, world, n = dist.get_rank(), dist.get_world_size(), len(za)
    ka, kb = AllRows.apply(za), AllRows.apply(zb)
    keys = torch.cat([ka, kb])
    own = torch.arange(n) + rank * n
    total = 0.0
    for q, self_at, pair_at in ((za, own, own + n * world), (zb, own + n * world, own)):
        logits = q @ keys.T / tau
        logits[torch.arange(n), self_at] = float("-inf")
        total = total + F.cross_entropy(logits, pair_at, reduction="sum")
    return total / (2 * n * world)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--save-at", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Encoder()
    for part in (net.stem, net.body, net.proj, net):
        fully_shard(part)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
    app = App(net, torch.optim.Adam(net.parameters(), lr=2e-3))
    if a.resume:
        dcp.load({"app": app}, checkpoint_id=os.path.join(a.resume, "app"))
    while app.step < a.steps:
        va, vb = (v.chunk(world)[rank] for v in two_views(app.step, a.batch))
        z = net(torch.cat([va, vb]))
        loss = nt_xent(*z.chunk(2))
        app.opt.zero_grad()
        loss.backward()
        app.opt.step()
        app.step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and app.step % 4 == 0:
            print(f"{app.step} {shown.item():.5f}")
        if app.step == a.save_at:
            dcp.save({"app": app}, checkpoint_id=os.path.join(a.out, "app"))
    dist.destroy_process_group()


main()
