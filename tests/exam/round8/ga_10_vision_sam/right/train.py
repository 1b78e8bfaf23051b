"""Small convolutional net trained with SAM + Nesterov SGD under FSDP2."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from sam import SAM


class ConvBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.GroupNorm(4, c)
        self.dw = nn.Conv2d(c, c, 3, padding=1, groups=c)
        self.pw = nn.Conv2d(c, c, 1)

    def forward(self, x):
        return x + self.pw(F.gelu(self.dw(self.norm(x))))


class ConvNet(nn.Module):
    def __init__(self, c=24, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, c, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(c) for _ in range(3))
        self.head = nn.Linear(c, classes)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x.mean((2, 3)))


def batches(start, steps, size, rank, world):
    proto = torch.randn(5, 3, 12, 12, generator=torch.Generator().manual_seed(17))
    for step in range(start, steps):
        g = torch.Generator().manual_seed(step)
        y = torch.randint(5, (size,), generator=g)
        x = proto[y] + 0.4 * torch.randn(size, 3, 12, 12, generator=g)
        yield step + 1, x.chunk(world)[rank], y.chunk(world)[rank]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = ConvNet()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    base = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9, nesterov=True, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(base, args.steps)
    sam = SAM(model.parameters(), base)

    begin = 0
    if args.resume:
        begin = max(int(n.split(".")[0]) for n in os.listdir(args.resume))
        ck = torch.load(os.path.join(args.resume, f"{begin}.rank{rank}"), weights_only=False)
        model.load_state_dict(ck["model"])
        base.load_state_dict(ck["base"])
        sched.load_state_dict(ck["sched"])

    for step, x, y in batches(begin, args.steps, args.batch, rank, world):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        sam.climb()
        F.cross_entropy(model(x), y).backward()
        sam.descend()
        sched.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 5 == 0:
            print(f"{step} loss {mean.item():.4f} grad norm {sam.norm.item():.3f}")
        if args.save_every and step % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            torch.save({"model": model.state_dict(), "base": base.state_dict(), "sched": sched.state_dict()},
                       os.path.join(args.out, f"{step}.rank{rank}"))

    if args.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
