"""Binary blob segmentation with model selection on a validation set.

The snapshot with the lowest validation loss is exported as plain full tensors at the end of training.
"""
import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard


class ConvBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)

    def forward(self, x):
        return F.silu(self.conv2(F.silu(self.conv1(x))))


class TinyUNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.enc = ConvBlock(1, width)
        self.mid = ConvBlock(width, 2 * width)
        self.dec = ConvBlock(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        e = self.enc(x)
        m = self.mid(F.avg_pool2d(e, 2))
        up = F.interpolate(m, scale_factor=2, mode="nearest")
        return self.out(self.dec(torch.cat([e, up], dim=1)))


def make_split(n, label_noise, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    centre = 3 + 10 * torch.rand(n, 2, generator=g)
    radius = 2 + 3 * torch.rand(n, generator=g)
    dist2 = (yy - centre[:, :1, None]) ** 2 + (xx - centre[:, 1:, None]) ** 2
    mask = (dist2 < radius[:, None, None] ** 2).float()
    image = mask + 0.8 * torch.randn(n, 16, 16, generator=g)
    flip = torch.rand(n, 16, 16, generator=g) < label_noise
    return image[:, None], torch.where(flip, 1 - mask, mask)[:, None]


@torch.no_grad()
def validate(model, images, masks, rank, world):
    logits = model(images[rank::world])
    total = F.binary_cross_entropy_with_logits(logits, masks[rank::world], reduction="sum")
    dist.all_reduce(total)
    return total.item() / masks.numel()


def keep(model):
    return {name: t.detach() for name, t in model.state_dict().items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=48)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--ckpt-at", type=int, default=0)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--resume", type=Path)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = TinyUNet()
    for block in (model.enc, model.mid, model.dec):
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-6)

    train_x, train_y = make_split(8, 0.25, seed=1)
    val_x, val_y = make_split(16, 0.0, seed=2)
    best, best_val, best_step, start = keep(model), float("inf"), 0, 0

    if args.resume:
        state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt), "best": best,
                 "best_val": best_val, "best_step": best_step, "step": start}
        dcp.load(state, checkpoint_id=args.resume / "last")
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, opt, state["optim"])
        best_val, best_step, start = state["best_val"], state["best_step"], state["step"]

    for step in range(start + 1, args.steps + 1):
        loss = F.binary_cross_entropy_with_logits(model(train_x[rank::world]), train_y[rank::world])
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)

        if step % 4 == 0:
            val = validate(model, val_x, val_y, rank, world)
            if val < best_val:
                best, best_val, best_step = keep(model), val, step
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step:3d} train loss {mean.item() / world:.4f} val {val:.4f}", flush=True)

        if args.out and step == args.ckpt_at:
            dcp.save({"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt), "best": best,
                      "best_val": best_val, "best_step": best_step, "step": step}, checkpoint_id=args.out / "last")

    out = args.out or args.resume
    if out:
        full = {name: t.full_tensor() for name, t in best.items()}
        if rank == 0:
            torch.save(full, out / "segmenter.pt")
            (out / "segmenter.json").write_text(json.dumps({"val": best_val, "step": best_step}))
    if rank == 0:
        print(f"best val {best_val:.4f} at step {best_step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
