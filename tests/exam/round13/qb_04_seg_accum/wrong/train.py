"""Segmentation of synthetic cells; gradients are accumulated over 4 micro-batches, 10 micro-batches an epoch."""
import argparse
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

OPTIONS = StateDictOptions(full_state_dict=True, cpu_offload=True)


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(4, o), nn.SiLU())


class MiniUNet(nn.Module):
    def __init__(self, w=12):
        super().__init__()
        self.down = conv(1, w)
        self.mid = conv(w, 2 * w)
        self.up = conv(3 * w, w)
        self.head = nn.Conv2d(w, 3, 1)

    def forward(self, x):
        a = self.down(x)
        b = F.interpolate(self.mid(F.max_pool2d(a, 2)), scale_factor=2)
        return self.head(self.up(torch.cat([a, b], 1)))


def cells(n, seed):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")
    c = 3 + 6 * torch.rand(n, 2, generator=g)
    r = 2 + 2 * torch.rand(n, 1, 1, generator=g)
    d = ((yy - c[:, 0, None, None]) ** 2 + (xx - c[:, 1, None, None]) ** 2).sqrt()
    mask = (d < r).long() + (d < 0.5 * r).long()
    image = 0.5 * mask + 0.3 * torch.randn(n, 12, 12, generator=g)
    return image.unsqueeze(1), mask


class Loader:
    """Micro-batches of `size` images over all ranks; the order is drawn anew in each epoch."""

    def __init__(self, images, masks, size, rank, world):
        self.images, self.masks, self.size, self.rank, self.world = images, masks, size, rank, world

    def __len__(self):
        return len(self.images) // self.size

    def epoch(self, number):
        order = list(range(len(self.images)))
        random.Random(number).shuffle(order)
        for i in range(len(self)):
            pick = order[i * self.size:(i + 1) * self.size][self.rank::self.world]
            yield self.images[pick], self.masks[pick]


def train_epoch(model, opt, loader, epoch, accum):
    total, steps = torch.zeros(()), 0
    n = len(loader)
    for i, (image, mask) in enumerate(loader.epoch(epoch)):
        window = min(accum, n - i // accum * accum)
        boundary = (i + 1) % accum == 0 or i + 1 == n
        model.set_requires_gradient_sync((i + 1) % accum == 0)
        loss = F.cross_entropy(model(image), mask)
        (loss / window).backward()
        total += loss.detach()
        if boundary:
            opt.step()
            opt.zero_grad()
            steps += 1
    dist.all_reduce(total)
    return total.item() / n / dist.get_world_size(), steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--accum", type=int, default=4)
    parser.add_argument("--save-epoch", type=int, default=None)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--resume", default=None)
    opts = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    model = MiniUNet()
    for part in (model.down, model.mid, model.up):
        fully_shard(part)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.8)
    loader = Loader(*cells(40, 4), 4, rank, world)

    begin = 0
    if opts.resume:
        saved = torch.load(os.path.join(opts.resume, "epoch.pt"))
        set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optim"], options=OPTIONS)
        begin = saved["epoch"]
    for epoch in range(begin, opts.epochs):
        mean, updates = train_epoch(model, optimizer, loader, epoch, opts.accum)
        if rank == 0:
            print(f"epoch {epoch} loss {mean:.5f} updates {updates}")
        if opts.save_epoch == epoch + 1:
            weights, moments = get_state_dict(model, optimizer, options=OPTIONS)
            if rank == 0:
                torch.save({"model": weights, "optim": moments, "epoch": epoch + 1}, os.path.join(opts.dir, "epoch.pt"))
            dist.barrier()
    dist.destroy_process_group()
