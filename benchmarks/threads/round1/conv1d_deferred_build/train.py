"""Waveform classifier whose model is built on the meta device and sharded unit by unit."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CLASSES, LENGTH, CH = 5, 32, 16


class ChannelScale(nn.Module):
    """Learned gain and offset per channel."""

    def __init__(self, ch):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(ch, 1))
        self.offset = nn.Parameter(torch.empty(ch, 1))
        self._reset_parameters()

    def _reset_parameters(self):
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.offset)

    def forward(self, x):
        return x * self.gain + self.offset


class WaveUnit(nn.Module):
    def __init__(self, ch, dilation):
        super().__init__()
        self.norm = nn.GroupNorm(4, ch)
        self.conv = nn.Conv1d(ch, ch, 3, padding=dilation, dilation=dilation)
        self.scale = ChannelScale(ch)
        self.mix = nn.Conv1d(ch, ch, 1)

    def forward(self, x):
        return x + self.mix(F.gelu(self.scale(self.conv(self.norm(x)))))


class WaveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(1, CH, 5, padding=2)
        self.units = nn.ModuleList(WaveUnit(CH, 2**i) for i in range(3))
        self.head = nn.Linear(CH, CLASSES)

    def forward(self, x):
        h = self.stem(x)
        for unit in self.units:
            h = unit(h)
        return self.head(h.square().mean(-1))


def materialize(module, device):
    """Give the meta parameters and buffers below ``module`` storage on ``device``."""
    for m in module.modules():
        owned = list(m.parameters(recurse=False)) + list(m.buffers(recurse=False))
        if any(t.is_meta for t in owned):
            m.to_empty(device=device, recurse=False)
            reset = getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", None)
            if reset is not None:
                reset()


def build(args, mesh, device):
    torch.manual_seed(args.seed)
    if not args.meta_init:
        model = WaveNet().to(device)
    else:
        with torch.device("meta"):
            model = WaveNet()
    # units first, so that only one of them is whole at any time
    for unit in model.units:
        materialize(unit, device)
        fully_shard(unit, mesh=mesh)
    materialize(model, device)
    fully_shard(model, mesh=mesh)
    left = [n for n, p in model.named_parameters() if p.is_meta]
    assert not left, f"still on the meta device: {left}"
    return model


def waves(seed, n):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    t = torch.arange(LENGTH) / LENGTH
    phase = 2 * math.pi * torch.rand(n, 1, generator=g)
    x = torch.sin(2 * math.pi * (y[:, None] * 2 + 1) * t + phase)
    return (x + 0.3 * torch.randn(n, LENGTH, generator=g)).unsqueeze(1), y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=4)
    ap.add_argument("--meta-init", action=argparse.BooleanOptionalAction, default=True)
    args = ap.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    model = build(args, init_device_mesh(device.type, (world,)), device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    n = args.batch // world
    for step in range(args.steps):
        x, y = (t[rank * n : (rank + 1) * n].to(device) for t in waves(8000 + step, args.batch))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step:2d} loss {mean.item():.6f}", flush=True)
    with torch.no_grad():
        x, y = waves(1, 128)
        hit = (model(x[rank::world].to(device)).argmax(-1) == y[rank::world].to(device)).sum()
    dist.all_reduce(hit)
    if rank == 0:
        print(f"accuracy {hit.item() / 128:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
