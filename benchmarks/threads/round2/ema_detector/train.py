"""Training of a small one-box detector on synthetic images, with a model EMA.

The EMA copy is what gets evaluated and exported; last.pt style checkpoints are written
every few epochs and training can be resumed from them.
"""
import argparse
import copy
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

IMG = 12


class ConvBlock(nn.Module):
    def __init__(self, c1, c2):
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, c2)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class Detector(nn.Module):
    """Predicts one box (cx, cy, w, h in [0, 1]) and a class for each image."""

    def __init__(self, classes=3):
        super().__init__()
        self.backbone = nn.ModuleList([ConvBlock(1, 8), ConvBlock(8, 16)])
        self.box = nn.Linear(16 * 9, 4)
        self.cls = nn.Linear(16 * 9, classes)

    def forward(self, x):
        for block in self.backbone:
            x = block(x)
        x = x.flatten(1)
        return self.box(x).sigmoid(), self.cls(x)


class ModelEMA:
    """Average of the weights with a decay that ramps up with the number of updates."""

    def __init__(self, shard, decay=0.98, tau=20):
        self.ema = shard
        self.updates = 0
        self.decay, self.tau = decay, tau
        for p in self.ema.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        d = self.decay * (1 - math.exp(-self.updates / self.tau))
        for e, p in zip(self.ema.parameters(), model.parameters()):
            e.lerp_(p.detach(), 1 - d)


def scenes(n, seed):
    gen = torch.Generator().manual_seed(seed)
    size = torch.randint(3, 7, (n, 2), generator=gen)
    corner = (torch.rand(n, 2, generator=gen) * (IMG - size + 1)).long()
    cls = torch.randint(3, (n,), generator=gen)
    img = 0.2 * torch.randn(n, 1, IMG, IMG, generator=gen)
    for i in range(n):
        (y, x), (h, w) = corner[i].tolist(), size[i].tolist()
        img[i, 0, y:y + h, x:x + w] += 0.6 + 0.5 * cls[i]
    box = torch.cat([(corner + size / 2).flip(1), size.flip(1).float()], dim=1) / IMG
    return img, box, cls


def detection_loss(model, img, box, cls):
    pred_box, pred_cls = model(img)
    return 5 * F.smooth_l1_loss(pred_box, box, beta=0.1) + F.cross_entropy(pred_cls, cls)


def mine(batch, device):
    return [t[dist.get_rank()::dist.get_world_size()].to(device) for t in batch]


@torch.no_grad()
def validate(model, device):
    loss = detection_loss(model, *mine(scenes(64, 1), device))
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def save_checkpoint(path, epoch, model, ema, optimizer):
    ckpt = {"epoch": epoch, "updates": ema.updates,
            "model": get_model_state_dict(model),
            "ema": get_model_state_dict(ema.ema),
            "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(ckpt, checkpoint_id=Path(path) / "last")


def load_checkpoint(path, model, ema, optimizer):
    ckpt = {"epoch": 0, "updates": 0,
            "model": get_model_state_dict(model),
            "ema": get_model_state_dict(ema.ema),
            "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(ckpt, checkpoint_id=Path(path) / "last")
    set_model_state_dict(model, ckpt["model"])
    set_model_state_dict(ema.ema, ckpt["ema"])
    set_optimizer_state_dict(model, optimizer, ckpt["optimizer"])
    ema.updates = ckpt["updates"]
    return ckpt["epoch"] + 1


def shard(model):
    for block in model.backbone:
        fully_shard(block)
    return fully_shard(model, reshard_after_forward=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--steps-per-epoch", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--project", default=None)
    parser.add_argument("--save-period", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    opt = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    net = Detector().to(device)
    ema = ModelEMA(shard(copy.deepcopy(net)))
    model = shard(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=opt.lr)
    start_epoch = load_checkpoint(opt.project, model, ema, optimizer) if opt.resume else 0

    for epoch in range(start_epoch, opt.epochs):
        mean = 0.0
        for i in range(opt.steps_per_epoch):
            batch = mine(scenes(opt.batch, 1000 + epoch * opt.steps_per_epoch + i), device)
            loss = detection_loss(model, *batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            mean += shown.item() / world / opt.steps_per_epoch
        fitness = validate(ema.ema, device)
        if rank == 0:
            print(f"{epoch + 1}/{opt.epochs}  train {mean:.6f}  ema val {fitness:.6f}", flush=True)
        if opt.save_period and (epoch + 1) % opt.save_period == 0 and epoch + 1 < opt.epochs:
            save_checkpoint(opt.project, epoch, model, ema, optimizer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
