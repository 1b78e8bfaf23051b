"""Small convnet with batch normalisation over the global batch (nn.SyncBatchNorm has no CPU path)."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def global_sum(t):
    return dist_fn.all_reduce(t)


class GlobalBatchNorm2d(nn.Module):
    def __init__(self, ch, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ch))
        self.bias = nn.Parameter(torch.zeros(ch))
        self.momentum, self.eps = momentum, eps
        self.register_buffer("running_mean", torch.zeros(ch))
        self.register_buffer("running_var", torch.ones(ch))

    def forward(self, x):
        if self.training:
            count = x.numel() / x.shape[1] * dist.get_world_size()
            stats = global_sum(torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])) / count
            mean, var = stats[0], stats[1] - stats[0].square()
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * count / (count - 1), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight * torch.rsqrt(var + self.eps)
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


class ConvBlock(nn.Module):
    def __init__(self, i, o, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(i, o, 3, stride=stride, padding=1, bias=False)
        self.bn = GlobalBatchNorm2d(o)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class Net(nn.Module):
    def __init__(self, classes=6):
        super().__init__()
        self.stem = ConvBlock(1, 12)
        self.stages = nn.ModuleList([ConvBlock(12, 16, 2), ConvBlock(16, 24, 2)])
        self.fc = nn.Linear(24, classes)

    def forward(self, x):
        x = self.stem(x)
        for s in self.stages:
            x = s(x)
        return self.fc(x.mean((2, 3)))


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 6, (n,), generator=g)
    gain = 0.5 + 2 * torch.rand(n, 1, 1, 1, generator=g)
    return gain * proto[y] + 0.7 * torch.randn(n, 1, 8, 8, generator=g), y


@torch.no_grad()
def accuracy(model, x, y, rank, world):
    model.eval()
    hit = torch.zeros(2)
    pred = model(x[rank::world]).argmax(1)
    hit[0] += (pred == y[rank::world]).sum()
    hit[1] += len(pred)
    dist.all_reduce(hit)
    model.train()
    return (hit[0] / hit[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = Net()
    for s in model.stages:
        fully_shard(s)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.steps)

    step = 0
    if args.resume:
        tags = [int(d) for d in os.listdir(args.resume) if d.isdigit()]
        msd, osd = get_state_dict(model, opt)
        st = {"model": msd, "optim": osd, "sched": sched.state_dict(), "step": 0}
        dcp.load(st, checkpoint_id=os.path.join(args.resume, str(max(tags))))
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["optim"])
        sched.load_state_dict(st["sched"])
        step = st["step"]

    x, y = blobs(960, 21)
    vx, vy = blobs(240, 22)
    while step < args.steps:
        perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(step * args.batch // len(x)))
        at = step * args.batch % len(x)
        idx = perm[at : at + args.batch][rank::world]
        loss = F.cross_entropy(model(x[idx]), y[idx], label_smoothing=0.05)
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        step += 1
        if step % 5 == 0:
            acc = accuracy(model, vx, vy, rank, world)
            if rank == 0:
                print(
                    f"step {step} loss {loss.item():.4f} val acc {acc:.3f} lr {sched.get_last_lr()[0]:.4f}", flush=True
                )
        if args.save_every and step % args.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save(
                {"model": msd, "optim": osd, "sched": sched.state_dict(), "step": step},
                checkpoint_id=os.path.join(args.out, str(step)),
            )

    if args.export:
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
