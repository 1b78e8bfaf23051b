"""Hard-example mining over the global batch, growing image size, and a LARS optimizer on sharded tensors."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class LARS(torch.optim.Optimizer):
    """Layer-wise trust ratios. The norms are those of the whole tensor, not of the local shard."""

    def __init__(self, params, lr, momentum=0.9, trust=0.015, wd=1e-4):
        super().__init__(params, dict(lr=lr, momentum=momentum, trust=trust, wd=wd))

    @torch.no_grad()
    def step(self):
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                d = p.grad
                scale = 1.0
                if p.ndim > 1:
                    d = d.add(p, alpha=g["wd"])
                    wn, gn = p.norm().full_tensor().item(), d.norm().full_tensor().item()
                    scale = g["trust"] * wn / (gn + 1e-9) if wn > 0 else 1.0
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.mul_(g["momentum"]).add_(d, alpha=scale)
                p.add_(buf, alpha=-g["lr"])


class ConvNet(nn.Module):
    def __init__(self, ch=16, classes=8):
        super().__init__()
        self.stem = nn.Conv2d(1, ch, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, ch), nn.ReLU(), nn.Conv2d(ch, ch, 3, padding=1)) for _ in range(3)
        )
        self.fc = nn.Linear(4 * ch, classes)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = x + b(x)
        return self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    coarse = torch.randn(8, 1, 4, 4, generator=torch.Generator().manual_seed(66))
    proto = F.interpolate(coarse, size=(12, 12), mode="bilinear")
    y = torch.randint(0, 8, (n,), generator=g)
    return 0.9 * proto[y] + 0.8 * torch.randn(n, 1, 12, 12, generator=g), y


def hard_mask(each, keep, rank):
    """1 for the samples of this rank that are among the `keep` hardest of the global batch."""
    everything = torch.empty(len(each) * dist.get_world_size())
    dist.all_gather_into_tensor(everything, each.detach().contiguous())
    chosen = torch.zeros_like(everything)
    chosen[everything.topk(keep).indices] = 1.0
    return chosen[rank * len(each) : (rank + 1) * len(each)]


def resolution(step, steps):
    return 6 if step < steps // 3 else 8 if step < 2 * steps // 3 else 12


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--keep", type=float, default=0.6)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ohem")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(41)
    model = ConvNet()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    opt = LARS(model.parameters(), lr=0.5)
    step = 0
    if args.resume:
        last = max(int(n) for n in os.listdir(args.resume))
        opt.zero_grad()
        for p in model.parameters():  # the buffers must exist before they can be read into
            opt.state[p]["momentum_buffer"] = torch.zeros_like(p)
        m, o = get_state_dict(model, opt)
        tree = {"model": m, "opt": o}
        dcp.load(tree, checkpoint_id=os.path.join(args.resume, str(last)))
        set_state_dict(model, opt, model_state_dict=tree["model"], optim_state_dict=tree["opt"])
        step = last

    x, y = images(1200, 1)
    keep = int(args.keep * args.batch)
    while step < args.steps:
        idx = torch.randint(0, 1200, (args.batch,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        size = resolution(step, args.steps)
        small = F.interpolate(x[idx], size=(size, size), mode="bilinear")
        each = F.cross_entropy(model(small), y[idx], reduction="none")
        mask = hard_mask(each, keep, rank)
        loss = (each * mask).sum() * world / keep
        opt.zero_grad()
        loss.backward()
        for g in opt.param_groups:
            g["lr"] = 0.5 * min(1.0, (step + 1) / 5)
        opt.step()
        step += 1
        s = torch.stack([loss.detach() / world, each.detach().mean() / world])
        dist.all_reduce(s)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} size {size} hard loss {s[0].item():.4f} all {s[1].item():.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o}, checkpoint_id=os.path.join(args.out, str(step)))
    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
