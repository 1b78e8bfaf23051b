"""Image classification with a tiny ViT, two parameter groups and AdamW.

rule: optim-before-shard
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

CLASSES, SAMPLES, GLOBAL_BATCH = 10, 640, 32


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


def parameter_groups(model, weight_decay):
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    no_decay = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    return [{"params": decay, "weight_decay": weight_decay}, {"params": no_decay, "weight_decay": 0.0}]


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        model = TinyViT()
        groups = parameter_groups(model, weight_decay=0.05)
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp_shard",))
        for block in model.encoder:
            fully_shard(block, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr)
        self.images, self.labels = make_images()

    def fit(self):
        local = GLOBAL_BATCH // self.world
        for step in range(self.args.steps):
            first = step * GLOBAL_BATCH % SAMPLES + self.rank * local
            images, labels = self.images[first : first + local], self.labels[first : first + local]
            loss = F.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if self.rank == 0:
                print(f"step {step + 1} loss {loss.item():.4f}", flush=True)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(parse_args()).fit()
    dist.destroy_process_group()
