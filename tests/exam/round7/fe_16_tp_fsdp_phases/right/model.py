import zlib

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Layer(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.gate = nn.Linear(dim, hidden)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(torch.sigmoid(self.gate(h)) * self.up(h))


class Encoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.inp = nn.Linear(cfg.features, cfg.dim)
        self.layers = nn.ModuleList(Layer(cfg.dim, cfg.hidden) for _ in range(cfg.depth))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return x


class TabularNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.encoder = Encoder(cfg)
        self.decoder = nn.Linear(cfg.dim, cfg.features)
        self.classifier = nn.Linear(cfg.dim, cfg.classes)

    def forward(self, x, task):
        h = self.encoder(x)
        return self.decoder(h) if task == "reconstruct" else self.classifier(h)


@torch.no_grad()
def fill(model, seed):
    """Every tensor has a seed of its own, from its name; so the values do not depend on the mesh."""
    for name, p in model.named_parameters():
        g = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
        if name.endswith("bias"):
            full = torch.zeros(p.shape)
        elif "norm" in name:
            full = torch.ones(p.shape)
        else:
            full = torch.randn(p.shape, generator=g) * p.shape[1] ** -0.5
        if isinstance(p, DTensor):
            full = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
        p.copy_(full)


def build(cfg, mesh):
    with torch.device("meta"):
        model = TabularNet(cfg)
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for layer in model.encoder.layers:
        parallelize_module(layer, mesh["tp"], plan)
    model.to_empty(device="cpu")
    fill(model, cfg.seed)
    for layer in model.encoder.layers:
        fully_shard(layer, mesh=mesh["dp"])
    # the sharded parameters are asked for after evaluations (new optimizer of a phase, checkpoints)
    return fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
