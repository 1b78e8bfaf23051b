"""Keyword spotting on synthetic spectrograms, with shift, gain and masking augmentation.

Clips are made once and kept in memory; DataLoader workers augment them on the fly.
"""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BANDS, FRAMES, WORDS = 16, 24, 5


def make_clips(count, seed):
    rng = np.random.default_rng(seed)
    word = rng.integers(0, WORDS, count)
    t = np.arange(FRAMES)
    clips = 0.3 * rng.standard_normal((count, BANDS, FRAMES)).astype(np.float32)
    for i, w in enumerate(word):
        # a word is a pair of formant tracks with a slope of its own
        onset = rng.uniform(0, 5)
        for base, slope in ((2 + w, 0.25 - 0.1 * w), (12 - w, 0.12 * w - 0.2)):
            track = base + slope * (t - onset) + 0.3 * rng.standard_normal()
            clips[i] += np.exp(-0.5 * (np.arange(BANDS)[:, None] - track) ** 2) * (t > onset)
    return clips, word


class AugmentedClips(Dataset):
    def __init__(self, clips, words, seed):
        self.clips, self.words = clips, words
        self.seed, self.epoch = seed, 0

    def __len__(self):
        return len(self.words)

    def __getitem__(self, i):
        rng = np.random.default_rng([self.seed, self.epoch, i])
        clip = np.roll(self.clips[i], rng.integers(-4, 5), axis=1)
        clip = clip * np.float32(rng.uniform(0.6, 1.5))
        start = rng.integers(0, FRAMES - 6)
        clip[:, start:start + rng.integers(2, 7)] = 0.0
        band = rng.integers(0, BANDS - 3)
        clip[band:band + rng.integers(1, 4)] = 0.0
        return torch.from_numpy(clip), int(self.words[i])


class ConvBlock(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)

    def forward(self, x):
        return x + self.conv(F.gelu(self.norm(x)))


class Spotter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv1d(BANDS, width, 3, padding=1)
        self.blocks = nn.ModuleList(ConvBlock(width, 2 ** i) for i in range(3))
        self.head = nn.Linear(width, WORDS)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(-1))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--clips", type=int, default=128)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--width", type=int, default=24)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--seed", type=int, default=9)
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    train = AugmentedClips(*make_clips(args.clips, 100), seed=args.seed)
    test_x, test_y = make_clips(80, 200)
    test_x, test_y = torch.from_numpy(test_x).to(device), torch.from_numpy(test_y).to(device)
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=args.seed)
    loader = DataLoader(
        train, batch_size=args.batch // world, sampler=sampler, num_workers=args.workers, drop_last=True
    )

    torch.manual_seed(args.seed)
    model = Spotter(args.width).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.02)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train.epoch = epoch
        model.train()
        seen = torch.zeros(2, device=device)
        for clips, words in loader:
            loss = F.cross_entropy(model(clips.to(device)), words.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            seen += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(seen)

        model.eval()
        with torch.no_grad():
            out = model(test_x[rank::world])
        right = (out.argmax(-1) == test_y[rank::world]).sum().float()
        nll = F.cross_entropy(out, test_y[rank::world], reduction="sum")
        result = torch.stack([right, nll])
        dist.all_reduce(result)
        acc, nll = (result / len(test_y)).tolist()
        if rank == 0:
            print(f"[{epoch}] train {(seen[0] / seen[1]).item():.5f} test acc {acc:.3f} nll {nll:.5f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
