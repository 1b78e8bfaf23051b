"""Contrastive training of an image and a text tower with DDP; negatives come from all ranks."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel

WIDTH, WORDS, PIXELS, VOCAB = 40, 8, 64, 30


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.first, self.second = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.second(F.relu(self.first(self.norm(x))))


class ImageTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(PIXELS, WIDTH)
        self.layers = nn.Sequential(*(Residual(WIDTH) for _ in range(2)))

    def forward(self, images):
        return F.normalize(self.layers(self.stem(images)), dim=-1)


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.Sequential(*(Residual(WIDTH) for _ in range(2)))

    def forward(self, text):
        return F.normalize(self.layers(self.words(text).mean(dim=1)), dim=-1)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = ImageTower(), TextTower()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, text):
        return self.image(images), self.text(text), self.scale.exp()


def pairs(count):
    gen = torch.Generator().manual_seed(6)
    text = torch.randint(0, VOCAB, (count, WORDS), generator=gen)
    look = torch.randn(VOCAB, PIXELS, generator=gen)
    return look[text].mean(dim=1) + 0.1 * torch.randn(count, PIXELS, generator=gen), text


def contrastive(images, text, scale, rank):
    """The mean over this rank's pairs; each is told apart from the pairs of all ranks."""
    all_images, all_text = torch.cat(all_gather(images)), torch.cat(all_gather(text))
    own = torch.arange(len(images)) + rank * len(images)
    by_image = F.cross_entropy(scale * images @ all_text.T, own)
    by_text = F.cross_entropy(scale * text @ all_images.T, own)
    return (by_image + by_text) / 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=24)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = DistributedDataParallel(TwoTowers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    images, text = pairs(240)
    for step in range(args.steps):
        at = step * args.batch % len(images)
        mine = torch.arange(at, at + args.batch).chunk(world)[rank]
        loss = contrastive(*model(images[mine], text[mine]), rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1} loss {mean.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
