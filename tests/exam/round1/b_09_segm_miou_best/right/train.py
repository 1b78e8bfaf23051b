"""Semantic segmentation of rectangles; the weights with the best validation mIoU are exported."""

import argparse
import json

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

CLASSES, SIZE, IGNORE = 6, 12, 255


class UNetish(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.e1 = nn.Sequential(nn.Conv2d(2, ch, 3, padding=1), nn.GroupNorm(3, ch), nn.ReLU())
        self.e2 = nn.Sequential(nn.Conv2d(ch, 2 * ch, 3, stride=2, padding=1), nn.GroupNorm(3, 2 * ch), nn.ReLU())
        self.mid = nn.Sequential(nn.Conv2d(2 * ch, 2 * ch, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(2 * ch, ch, 2, stride=2)
        self.head = nn.Conv2d(2 * ch, CLASSES, 1)

    def forward(self, x):
        a = self.e1(x)
        b = self.mid(self.e2(a))
        return self.head(torch.cat([a, self.up(b)], 1))


def make(n, seed, sort=False):
    g = torch.Generator().manual_seed(seed)
    mask = torch.zeros(n, SIZE, SIZE, dtype=torch.long)
    cls = torch.randint(1, CLASSES, (n,), generator=g)
    if sort:  # the validation files lie in folders, one per category
        cls = cls.sort().values
    for i in range(n):
        r, c = torch.randint(0, 6, (2,), generator=g).tolist()
        h, w = torch.randint(3, 7, (2,), generator=g).tolist()
        mask[i, r : r + h, c : c + w] = cls[i]
    ang = mask.float() * (2 * torch.pi / CLASSES)
    img = torch.stack([ang.cos(), ang.sin()], 1) + 0.55 * torch.randn(n, 2, SIZE, SIZE, generator=g)
    mask[:, 0] = IGNORE
    return img, mask


@torch.no_grad()
def validate(model, img, mask, rank, world):
    model.eval()
    conf = torch.zeros(CLASSES, CLASSES, dtype=torch.float64)
    for x, y in zip(img.chunk(world)[rank].split(16), mask.chunk(world)[rank].split(16)):
        pred = model(x).argmax(1)
        keep = y != IGNORE
        conf += torch.bincount(y[keep] * CLASSES + pred[keep], minlength=CLASSES**2).reshape(CLASSES, CLASSES)
    dist.all_reduce(conf)
    iou = conf.diag() / (conf.sum(0) + conf.sum(1) - conf.diag()).clamp(min=1)
    miou = iou.mean()
    model.train()
    return miou.item()


def gather(model):
    return {k: v.full_tensor().clone() for k, v in model.state_dict().items()}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--eval-every", type=int, default=3)
    ap.add_argument("--lr", type=float, default=1.5e-2)
    ap.add_argument("--export", default="")
    ap.add_argument("--metrics", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = UNetish()
    for part in (model.e2, model.mid, model.up):
        fully_shard(part)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    img, mask = make(512, 1)
    vimg, vmask = make(96, 2, sort=True)

    best, best_step, best_weights, history = -1.0, 0, None, []
    for step in range(1, args.steps + 1):
        idx = torch.randint(0, len(img), (args.batch,), generator=torch.Generator().manual_seed(step)).chunk(world)[
            rank
        ]
        # every mask has the same number of ignored pixels, hence a plain mean is right
        loss = F.cross_entropy(model(img[idx]), mask[idx], ignore_index=IGNORE)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % args.eval_every == 0:
            miou = validate(model, vimg, vmask, rank, world)
            history.append({"step": step, "miou": miou})
            if miou > best:
                best, best_step, best_weights = miou, step, gather(model)
            if rank == 0:
                print(f"step {step:3d} loss {loss.item():.4f} mIoU {miou:.4f} best {best:.4f}@{best_step}", flush=True)

    if rank == 0:
        if args.export:
            torch.save(best_weights, args.export)
        if args.metrics:
            with open(args.metrics, "w") as f:
                json.dump({"best": best, "best_step": best_step, "history": history}, f)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
