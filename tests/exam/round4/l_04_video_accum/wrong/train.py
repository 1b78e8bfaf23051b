"""Video classification (direction of motion) with gradient accumulation over micro-batches of clips."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SIZE, FRAMES, CLASSES = 8, 6, 4


def moving_squares(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    x0 = torch.randint(0, SIZE, (n, 2), generator=g)
    step = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
    clips = 0.2 * torch.randn(n, 1, FRAMES, SIZE, SIZE, generator=g)
    for i in range(n):
        for t in range(FRAMES):
            r, c = ((x0[i] + t * step[y[i]]) % SIZE).tolist()
            clips[i, 0, t, r, c] += 2.0
            clips[i, 0, t, (r + 1) % SIZE, c] += 2.0
    return TensorDataset(clips, y)


class VideoNet(nn.Module):
    def __init__(self, ch=8):
        super().__init__()
        self.stem = nn.Conv3d(1, ch, (3, 3, 3), padding=1, padding_mode="circular")
        self.body = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, ch), nn.GELU(), nn.Conv3d(ch, ch, 3, padding=1, padding_mode="circular"))
            for _ in range(2))
        self.head = nn.Linear(ch, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for blk in self.body:
            x = x + blk(x)
        return self.head(F.gelu(x).square().mean(dim=(2, 3, 4)))


@torch.no_grad()
def accuracy(model, data, rank, world):
    model.eval()
    hit = torch.zeros(2)
    x, y = data.tensors[0][rank::world], data.tensors[1][rank::world]
    hit[0] = (model(x).argmax(-1) == y).sum()
    hit[1] = len(y)
    dist.all_reduce(hit)
    model.train()
    return (hit[0] / hit[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=8)
    ap.add_argument("--micro-batch", type=int, default=16, help="clips per micro-batch over all ranks")
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    train, test = moving_squares(160, 1), moving_squares(64, 2)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=9, drop_last=True)
    loader = DataLoader(train, batch_size=args.micro_batch // world, sampler=sampler, drop_last=True)

    model = VideoNet()
    for blk in model.body:
        fully_shard(blk)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    n = len(loader)
    total = args.epochs * -(-n // args.accum)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, args.lr, total_steps=total, pct_start=0.2)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        shown = torch.zeros(1)
        for i, (clip, y) in enumerate(loader):
            window = min(args.accum, n - i // args.accum * args.accum)
            full = (i + 1) % args.accum == 0
            boundary = full or i + 1 == n
            model.set_requires_gradient_sync(full)
            loss = F.cross_entropy(model(clip), y)
            (loss / window).backward()
            shown += loss.detach()
            if boundary:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                opt.step()
                sched.step()
                opt.zero_grad()
        dist.all_reduce(shown)
        acc = accuracy(model, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {shown.item() / n / world:.4f} test acc {acc:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
