import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from losses import IGNORE, deep_supervision
from lookahead import Lookahead


class UNet(nn.Module):
    def __init__(self, ch=10, classes=3):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(1, ch, 3, padding=1), nn.ReLU())
        self.enc2 = nn.Sequential(nn.Conv2d(ch, 2 * ch, 3, 2, 1), nn.ReLU(), nn.Conv2d(2 * ch, 2 * ch, 3, padding=1), nn.ReLU())
        self.dec = nn.Sequential(nn.Conv2d(3 * ch, ch, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(ch, classes, 1)
        self.aux = nn.Conv2d(2 * ch, classes, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(a)
        h = self.dec(torch.cat([a, F.interpolate(b, scale_factor=2)], 1))
        return self.head(h), self.aux(b)


def scans(n, gen):
    """Disc in a ring on noise; a band of random height at the top of each scan is not annotated."""
    c = torch.rand(n, 2, 1, 1, generator=gen) * 6 + 3
    r = torch.rand(n, 1, 1, generator=gen) * 2 + 1
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    d = ((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2).sqrt()
    y = (d < r).long() * 2 + ((d >= r) & (d < r + 2)).long()
    x = (y.float() - 0.5 + 0.6 * torch.randn(n, 12, 12, generator=gen)).unsqueeze(1)
    band = torch.randint(0, 10, (n, 1, 1), generator=gen)
    return x, torch.where(yy < band, IGNORE, y)


@torch.no_grad()
def dice_score(model, rank, world):
    x, y = scans(48, torch.Generator().manual_seed(1000))
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    pred = model(x)[0].argmax(1)
    ok = y != IGNORE
    table = torch.tensor([[((pred == c) & (y == c) & ok).sum(), ((pred == c) & ok).sum() + (y == c).sum()] for c in range(3)])
    dist.all_reduce(table)
    return (2 * table[:, 0] / table[:, 1]).mean().item()


def rows_of(rank, world, n):
    # scans come in batches of 10, which 4 ranks cannot share equally: 3, 3, 2, 2
    return range(n)[rank::world]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=22)
    ap.add_argument("--batch", type=int, default=10)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=pathlib.Path, default="scan_seg")
    ap.add_argument("--resume", type=pathlib.Path)
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(70)
    model = UNet()
    for part in (model.enc1, model.enc2, model.dec):
        fully_shard(part)
    fully_shard(model)
    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    sgd = torch.optim.SGD([{"params": decay, "weight_decay": 1e-3}, {"params": plain}], lr=args.lr, momentum=0.9)
    opt = Lookahead(sgd, k=4)
    gen = torch.Generator().manual_seed(71)
    step = 0
    if args.resume:
        last = max(args.resume.glob("step-*"), key=lambda p: int(p.name[5:]))
        blob = torch.load(last / f"{rank}-of-{world}.pt", weights_only=False)
        model.load_state_dict(blob["model"])
        opt.load_state_dict(blob["opt"])
        gen.set_state(blob["gen"])
        step = blob["step"]

    for step in range(step + 1, args.steps + 1):
        x, y = scans(args.batch, gen)
        mine = list(rows_of(rank, world, args.batch))
        loss = deep_supervision(model(x[mine]), y[mine])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 4 == 0:
            log = loss.detach() / world
            dist.all_reduce(log)
            score = dice_score(model, rank, world)
            if rank == 0:
                print(f"step {step} loss {log.item():.4f} dice {score:.4f}")
        if args.save_every and step % args.save_every == 0:
            folder = args.out / f"step-{step}"
            folder.mkdir(parents=True, exist_ok=True)
            blob = {"model": model.state_dict(), "opt": opt.state_dict(), "gen": gen.get_state(), "step": step}
            torch.save(blob, folder / f"{rank}-of-{world}.pt")
            dist.barrier()

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
