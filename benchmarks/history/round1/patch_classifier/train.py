"""Patch-mixer image classifier on generated textures.

A small `Engine` keeps the distributed details (sharding, backward, clipping, metric
reduction) away from the training loop:

    torchrun --nproc-per-node 2 train.py
"""
import dataclasses
import math
import os
from enum import Enum

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


class Strategy(str, Enum):
    NONE = "none"
    FSDP = "fsdp"


@dataclasses.dataclass
class ShardingPlugin:
    """How the model is sharded; version 1 is the wrapper, version 2 is `fully_shard`."""

    fsdp_version: int = 2
    reshard_after_forward: bool = True
    param_dtype: torch.dtype = torch.float32
    wrap_cls: tuple = ()

    def shard(self, model, mesh):
        policy = MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=torch.float32)
        kwargs = dict(mesh=mesh, mp_policy=policy, reshard_after_forward=self.reshard_after_forward)
        for module in model.modules():
            if isinstance(module, self.wrap_cls):
                fully_shard(module, **kwargs)
        fully_shard(model, **kwargs)
        return model


class Engine:
    def __init__(self, strategy=Strategy.FSDP, plugin=None, grad_accum=1):
        self.device_type = "cuda" if torch.cuda.is_available() else "cpu"
        dist.init_process_group("nccl" if self.device_type == "cuda" else "gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        if self.device_type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.mesh = init_device_mesh(self.device_type, (self.world,))
        self.strategy = strategy
        self.plugin = plugin
        self.grad_accum = grad_accum
        self.models = []
        self._micro = 0

    @property
    def is_fsdp2(self):
        return self.strategy == Strategy.FSDP and self.plugin.fsdp_version == 2

    @property
    def sync_gradients(self):
        return self._micro % self.grad_accum == 0

    def prepare(self, model):
        model.to(self.device_type)
        if self.strategy == Strategy.FSDP:
            model = self.plugin.shard(model, self.mesh)
        self.models.append(model)
        return model

    def backward(self, loss):
        self._micro += 1
        for model in self.models:
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(self.sync_gradients)
        (loss / self.grad_accum).backward()

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2.0):
        parameters = list(parameters)
        if self.strategy == Strategy.FSDP:
            ids = [id(p) for p in parameters]
            for model in self.models:
                if ids == [id(p) for p in model.parameters()]:
                    if not self.is_fsdp2:
                        return model.clip_grad_norm_(max_norm, norm_type)
                    norm = nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
                    return norm.full_tensor()
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def reduce_sum(self, *values):
        t = torch.stack([v.detach().float() if torch.is_tensor(v) else torch.tensor(float(v)) for v in values])
        t = t.to(self.device_type)
        dist.all_reduce(t)
        return t.tolist()

    def print(self, *a):
        if self.rank == 0:
            print(*a, flush=True)

    def end(self):
        dist.destroy_process_group()


class MixerBlock(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channel = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.token(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel(self.n2(x))


class PatchMixer(nn.Module):
    def __init__(self, side=16, patch=4, dim=24, depth=2, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(1, dim, patch, patch)
        self.blocks = nn.ModuleList(MixerBlock((side // patch) ** 2, dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, images):
        x = self.stem(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Textures(torch.utils.data.Dataset):
    """Oriented gratings with noise; the class is the orientation."""

    def __init__(self, count, seed, side=16, classes=4):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (count,), generator=g)
        angle = self.labels * math.pi / classes + 0.15 * torch.randn(count, generator=g)
        freq = 0.8 + 0.6 * torch.rand(count, generator=g)
        phase = 2 * math.pi * torch.rand(count, generator=g)
        yy, xx = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
        wave = angle.cos()[:, None, None] * xx + angle.sin()[:, None, None] * yy
        images = torch.sin(freq[:, None, None] * wave + phase[:, None, None])
        self.images = (images + 0.3 * torch.randn(images.shape, generator=g)).unsqueeze(1)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


def epoch_batches(data, epoch, batch_size, engine, shuffle=True):
    if shuffle:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1234 + epoch))
    else:
        order = torch.arange(len(data))
    for at in range(0, len(data) - batch_size + 1, batch_size):
        mine = order[at : at + batch_size][engine.rank :: engine.world]
        yield data.images[mine].to(engine.device_type), data.labels[mine].to(engine.device_type)


@torch.no_grad()
def accuracy(model, data, engine):
    model.eval()
    right, seen = torch.zeros(()), 0
    for images, labels in epoch_batches(data, 0, 64, engine, shuffle=False):
        right += (model(images).argmax(-1) == labels).sum().cpu()
        seen += len(labels)
    model.train()
    hits, total = engine.reduce_sum(right, seen)
    return hits / total


EPOCHS, BATCH, ACCUM, LR, MAX_NORM = 3, 32, 2, 0.08, 1.0


def main():
    engine = Engine(plugin=ShardingPlugin(wrap_cls=(MixerBlock,)), grad_accum=ACCUM)
    torch.manual_seed(0)
    model = engine.prepare(PatchMixer())
    train, test = Textures(512, seed=1), Textures(256, seed=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, nesterov=True)
    total_steps = EPOCHS * len(train) // (BATCH * ACCUM)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=total_steps, cycle_momentum=False)

    step = 0
    for epoch in range(EPOCHS):
        running = []
        for images, labels in epoch_batches(train, epoch, BATCH, engine):
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.05)
            engine.backward(loss)
            running.append(loss.detach())
            if not engine.sync_gradients:
                continue
            norm = engine.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            (total,) = engine.reduce_sum(torch.stack(running).mean())
            engine.print(f"epoch {epoch} step {step} loss {total / engine.world:.6f} norm {norm.item():.5f}")
            running.clear()
        engine.print(f"epoch {epoch} test accuracy {accuracy(model, test, engine):.4f}")
    engine.end()


if __name__ == "__main__":
    main()
