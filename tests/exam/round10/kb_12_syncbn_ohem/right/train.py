import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from segnet import SegNet

CLASSES, IGNORE = 4, 255


def make_scenes(n, seed, size=12):
    g = torch.Generator().manual_seed(seed)
    colour = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.2, 0.0], [0.0, 1.0, 0.3], [0.2, 0.0, 1.0]])
    y = torch.zeros(n, size, size, dtype=torch.long)
    for i in range(n):
        for _ in range(3):
            t, l = torch.randint(0, size - 4, (2,), generator=g).tolist()
            h, w = torch.randint(3, 7, (2,), generator=g).tolist()
            y[i, t:t + h, l:l + w] = int(torch.randint(CLASSES, (), generator=g))
    x = colour[y].permute(0, 3, 1, 2) + 0.4 * torch.randn(n, 3, size, size, generator=g)
    y[torch.rand(y.shape, generator=g) < 0.1] = IGNORE
    return x, y


def ohem_loss(logits, target, keep):
    """Cross entropy over the hardest `keep` share of the valid pixels of the batch of all ranks."""
    pixel = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="none").flatten()
    valid = (target != IGNORE).flatten()
    with torch.no_grad():
        mine = torch.where(valid, pixel, torch.full_like(pixel, -1.0))
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        everything = torch.cat(parts)
        kept = max(1, int(keep * int((everything >= 0).sum())))
        threshold = everything.topk(kept).values[-1]
        hard = valid & (pixel >= threshold)
        count = hard.sum().float()
        dist.all_reduce(count)
    # FSDP averages over the ranks, the loss is a sum over them
    return (pixel * hard).sum() * dist.get_world_size() / count


@torch.no_grad()
def mean_iou(model, x, y, batch=16):
    model.eval()
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.long)
    rank, world = dist.get_rank(), dist.get_world_size()
    for xb, yb in zip(x.split(batch), y.split(batch)):
        xb, yb = xb.chunk(world)[rank], yb.chunk(world)[rank]
        pred = model(xb)[0].argmax(1)
        ok = yb != IGNORE
        confusion += torch.bincount(yb[ok] * CLASSES + pred[ok], minlength=CLASSES ** 2).view(CLASSES, CLASSES)
    dist.all_reduce(confusion)
    model.train()
    inter = confusion.diagonal().double()
    return (inter / (confusion.sum(0) + confusion.sum(1) - confusion.diagonal()).clamp(min=1)).mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--eval-every", type=int, default=5)
    ap.add_argument("--work-dir", default=None)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(14)
    model = SegNet(CLASSES)
    for part in (model.stem, *model.body, model.fuse):
        fully_shard(part)
    fully_shard(model, reshard_after_forward=True)
    norms = [p for p in model.parameters() if p.ndim == 1]
    convs = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.SGD([{"params": convs, "weight_decay": 5e-4}, {"params": norms}], lr=0.05, momentum=0.9)
    poly = torch.optim.lr_scheduler.PolynomialLR(optimizer, args.steps, power=0.9)
    x, y = make_scenes(128, seed=1)
    val = make_scenes(32, seed=2)
    order = torch.Generator().manual_seed(77)
    history, step = [], 0

    def snapshot():
        return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer),
                "poly": poly.state_dict(), "order": order.get_state(), "step": step, "history": json.dumps(history)}

    if args.resume:
        newest = sorted(f for f in os.listdir(args.work_dir) if f.startswith("ckpt_"))[-1]
        s = snapshot()
        dcp.load(s, checkpoint_id=os.path.join(args.work_dir, newest))
        set_model_state_dict(model, s["model"])
        set_optimizer_state_dict(model, optimizer, s["optim"])
        poly.load_state_dict(s["poly"])
        order.set_state(s["order"])
        step, history = s["step"], json.loads(s["history"])

    while step < args.steps:
        idx = torch.randperm(len(x), generator=order)[: args.batch].chunk(world)[rank]
        main_out, aux_out = model(x[idx])
        small = y[idx][:, ::2, ::2].contiguous()
        keep = 1.0 - 0.7 * step / args.steps
        loss = ohem_loss(main_out, y[idx], keep) + 0.4 * ohem_loss(aux_out, small, 1.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        poly.step()
        optimizer.zero_grad()
        step += 1
        if step % args.eval_every == 0:
            history.append(mean_iou(model, *val))
            dist.all_reduce(value := loss.detach() / world)
            if rank == 0:
                print(f"step {step} loss {value.item():.4f} mIoU {history[-1]:.4f} best {max(history):.4f}")
        if args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(), checkpoint_id=os.path.join(args.work_dir, f"ckpt_{step:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
