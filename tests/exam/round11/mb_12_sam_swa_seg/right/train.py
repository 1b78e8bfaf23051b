"""Segmentation with adaptive SAM (two passes a step), cyclic learning rate, SWA, Dice over the whole batch."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sam import SAM
from segdata import volumes
from swa import SWA

CYCLE, CYCLES, BATCH, CLASSES = 6, 3, 16, 3


def conv(a, b, stride=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.GroupNorm(4, b), nn.SiLU())


class SegNet(nn.Module):
    def __init__(self, w=12):
        super().__init__()
        self.down1, self.down2 = conv(1, w), conv(w, 2 * w, 2)
        self.mid = conv(2 * w, 2 * w)
        self.up = nn.ConvTranspose2d(2 * w, w, 2, 2)
        self.last = nn.Conv2d(2 * w, CLASSES, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.mid(self.down2(a))
        return self.last(torch.cat([a, self.up(b)], 1))


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def dice_and_ce(logits, target, world):
    """Cross entropy plus batch Dice. The sums of the Dice run over all ranks and have gradients on every rank, so
    each rank holds the whole Dice; the cross entropy is the local mean. Both are right under FSDP's mean."""
    prob = logits.softmax(1)
    hot = F.one_hot(target, CLASSES).permute(0, 3, 1, 2).float()
    sums = torch.stack([(prob * hot).sum((0, 2, 3)), prob.sum((0, 2, 3)), hot.sum((0, 2, 3))])
    inter, p, t = SumOverRanks.apply(sums)
    dice = 1 - ((2 * inter + 1) / (p + t + 1)).mean()
    return F.cross_entropy(logits, target) + dice


@torch.no_grad()
def mean_iou(model, x, y, rank, world):
    part = torch.arange(len(y)).chunk(world)[rank]
    pred = model(x[part]).argmax(1)
    model.reshard()
    inter = torch.stack([((pred == c) & (y[part] == c)).sum() for c in range(CLASSES)])
    union = torch.stack([((pred == c) | (y[part] == c)).sum() for c in range(CLASSES)])
    dist.all_reduce(inter)
    dist.all_reduce(union)
    return (inter / union.clamp(min=1)).mean().item()


def steps(start, x, y, rank, world):
    for step in range(start, CYCLE * CYCLES):
        g = torch.Generator().manual_seed(step)
        idx = torch.randperm(len(y), generator=g)[:BATCH].chunk(world)[rank]
        yield step, x[idx], y[idx]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="seg")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(12)
    model = SegNet()
    for m in (model.down1, model.down2, model.mid):
        fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    sam, swa = SAM(model, base), SWA(model)
    x, y = volumes(160, 1)
    vx, vy = volumes(32, 2)

    start = 0
    if args.resume:
        path = os.path.join(args.resume, max(os.listdir(args.resume)))
        m, o = get_state_dict(model, base)
        state = {"model": m, "optim": o, "swa": swa.mean, "swa_n": 0, "step": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, base, model_state_dict=state["model"], optim_state_dict=state["optim"])
        swa.n, start = state["swa_n"], state["step"]

    for step, bx, by in steps(start, x, y, rank, world):
        for group in base.param_groups:
            group["lr"] = 0.1 * (1 - (step % CYCLE) / CYCLE) + 0.01
        first = dice_and_ce(model(bx), by, world)
        first.backward()
        sam.ascend()
        dice_and_ce(model(bx), by, world).backward()
        sam.descend()
        if (step + 1) % CYCLE == 0:
            swa.collect(model)
        log = first.detach().clone()
        dist.all_reduce(log)
        if rank == 0:
            print(f"step {step + 1} loss {log.item() / world:.5f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, base)
            dcp.save({"model": m, "optim": o, "swa": swa.mean, "swa_n": swa.n, "step": step + 1},
                     checkpoint_id=os.path.join(args.out, f"{step + 1:03d}"))

    last = mean_iou(model, vx, vy, rank, world)
    swa.swap(model)
    averaged = mean_iou(model, vx, vy, rank, world)
    if rank == 0:
        print(f"mIoU last {last:.4f} averaged {averaged:.4f}")
    if args.export:     # the averaged weights are in the model now
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
