"""Progressive super-resolution: the net starts with x2 and gets one more upsampling stage in mid-training (x4)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

GROW_AT, STEPS, BATCH = 6, 18, 16


class Stage(nn.Module):
    """Doubles the resolution of the features."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, 4 * width, 3, padding=1)
        self.mix = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, h):
        h = F.pixel_shuffle(self.conv(h), 2)
        return h + self.mix(F.silu(h))


class Upscaler(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.width = width
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.stages = nn.ModuleList([Stage(width)])
        self.to_image = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, low):
        h = self.stem(low)
        for stage in self.stages:
            h = stage(h)
        base = F.interpolate(low, scale_factor=2 ** len(self.stages), mode="bilinear", align_corners=False)
        return base + self.to_image(h)


def scenes(n, gen):
    ys, xs = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    k = torch.rand(3, n, 1, 1, generator=gen)
    return torch.tanh(4 * torch.sin(ys * k[0] + xs * k[1] + 6 * k[2]))[:, None]


def pair(high, stages):
    """Low resolution is always 4x4; the target is 8x8 before the growth and 16x16 after it."""
    target = F.avg_pool2d(high, 2) if stages == 1 else high
    return F.avg_pool2d(high, 4), target


def grow(model, opt):
    torch.manual_seed(100 + len(model.stages))
    stage = Stage(model.width)
    model.stages.append(stage)
    opt.add_param_group({"params": list(stage.parameters()), "lr": 4e-3})


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = Upscaler()
    fully_shard(model.stages[0])
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, foreach=False)
    gen = torch.Generator().manual_seed(77)

    step = 0
    if args.resume:
        step = max(int(d) for d in os.listdir(args.resume))
        if step >= GROW_AT:
            grow(model, opt)
        m, o = get_state_dict(model, opt)
        sd = {"model": m, "opt": o, "gen": gen.get_state()}
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, str(step)))
        set_state_dict(model, opt, model_state_dict=m, optim_state_dict=o)
        gen.set_state(sd["gen"])

    while step < STEPS:
        low, target = pair(scenes(BATCH, gen)[rank::world], len(model.stages))
        loss = F.l1_loss(model(low), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step == GROW_AT:
            grow(model, opt)
        if rank == 0 and step % 2 == 0:
            print(f"step {step} stages {len(model.stages)} loss {loss.item():.4f}", flush=True)
        if args.out and args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "gen": gen.get_state()}, checkpoint_id=os.path.join(args.out, str(step)))

    with torch.no_grad():
        low, target = pair(scenes(32, torch.Generator().manual_seed(5))[rank::world], len(model.stages))
        err = F.mse_loss(model(low), target)
    dist.all_reduce(err)
    if rank == 0:
        print(f"validation psnr {10 * torch.log10(4 / (err / world)).item():.4f} dB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
