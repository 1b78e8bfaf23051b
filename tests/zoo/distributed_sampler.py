"""Image classification with a tiny ViT, a DataLoader and a DistributedSampler."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES, SAMPLES, GLOBAL_BATCH = 10, 96, 32


class EncoderBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, bias=False, batch_first=True)
        self.ln2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class TinyViT(nn.Module):
    def __init__(self, image=16, patch=4, dim=32, heads=4, depth=2, classes=CLASSES):
        super().__init__()
        self.patchify = nn.Conv2d(1, dim, kernel_size=patch, stride=patch)
        self.pos = nn.Parameter(torch.zeros((image // patch) ** 2, dim))
        self.encoder = nn.ModuleList([EncoderBlock(dim, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.classify = nn.Linear(dim, classes)

    def forward(self, images):
        x = self.patchify(images).flatten(2).transpose(1, 2) + self.pos
        for block in self.encoder:
            x = block(x)
        return self.classify(self.norm(x).mean(dim=1))


def make_images():
    """Noisy copies of one prototype image for each class."""
    gen = torch.Generator().manual_seed(3)
    prototypes = torch.randn(CLASSES, 1, 16, 16, generator=gen)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=gen)
    images = prototypes[labels] + 0.5 * torch.randn(SAMPLES, 1, 16, 16, generator=gen)
    return images, labels


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(args.seed)
    model = TinyViT()
    for block in model.encoder:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    dataset = TensorDataset(*make_images())
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True, seed=args.seed, drop_last=True)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // world, sampler=sampler, drop_last=True)
    step, epoch = 0, 0
    while step < args.steps:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
            if step == args.steps:
                break
        epoch += 1


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(parse_args())
    dist.destroy_process_group()
