"""ViT training in a trainer class; weights and optimizer state are checkpointed.

rule: scheduler-or-progress-not-restored
save_args: --save-every 3 --out {checkpoint}
resume_args: --resume {checkpoint}
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR

CLASSES, SAMPLES, GLOBAL_BATCH, STEPS = 10, 640, 32, 20


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


def latest_checkpoint(folder):
    complete = [p.parent for p in Path(folder).glob("step_*/.metadata")]
    if not complete:
        raise SystemExit(f"no checkpoint in {folder}")
    return max(complete, key=lambda p: p.name)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.model = TinyViT()
        mesh = init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp_shard",))
        for block in self.model.encoder:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=args.steps)
        self.images, self.labels = make_images()
        self.step = 0

    def save(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        path = Path(self.args.out) / f"step_{self.step:06d}"
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)

    def load(self, path):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def train_step(self):
        local = GLOBAL_BATCH // self.world
        first = self.step * GLOBAL_BATCH % SAMPLES + self.rank * local
        loss = F.cross_entropy(self.model(self.images[first : first + local]), self.labels[first : first + local])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        return loss.item()

    def fit(self):
        if self.args.resume:
            self.load(latest_checkpoint(self.args.resume))
        while self.step < self.args.steps:
            loss = self.train_step()
            if self.rank == 0:
                print(f"step {self.step} loss {loss:.4f}", flush=True)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--out", default="checkpoints")
    parser.add_argument("--resume", default=None, help="folder with step_* checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(parse_args()).fit()
    dist.destroy_process_group()
