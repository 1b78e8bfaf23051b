"""Autoencoder of made-up spectra: Adam first, then SGD with a schedule of its own."""
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

STEPS = int(os.environ.get("SPECTRA_STEPS", 72))
SWITCH = int(os.environ.get("SPECTRA_SWITCH", 42))
SPARSE = float(os.environ.get("SPECTRA_SPARSE", 0))
BATCH, BINS, CODE = 24, 40, 10


class Autoencoder(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(BINS, width), nn.GELU(), nn.Linear(width, CODE))
        self.decoder = nn.Sequential(nn.Linear(CODE, width), nn.GELU(), nn.Linear(width, BINS))

    def forward(self, x):
        code = self.encoder(x)
        return self.decoder(code), code


def spectra(step):
    """Two peaks each, on a slope, with noise."""
    g = torch.Generator().manual_seed(3_000 + step)
    at = torch.rand(BATCH, 2, 1, generator=g) * BINS
    wide = 1.5 + 2.5 * torch.rand(BATCH, 2, 1, generator=g)
    peaks = torch.exp(-(((torch.arange(BINS) - at) / wide) ** 2)).sum(1)
    slope = torch.rand(BATCH, 1, generator=g) * torch.linspace(-0.5, 0.5, BINS)
    return peaks + slope + 0.05 * torch.randn(BATCH, BINS, generator=g)


def loss_of(model, x):
    out, code = model(x)
    error = (out - x).pow(2).sum(1).mean()
    return error if SPARSE == 0 else error + SPARSE * code.abs().sum() / len(x)


def first_phase(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, eps=1e-6)
    return optimizer, LambdaLR(optimizer, lambda k: min(1.0, (k + 1) / 8))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    model = Autoencoder()
    fully_shard(model.encoder)
    fully_shard(model.decoder)
    fully_shard(model)
    optimizer, schedule = first_phase(model)
    for step in range(STEPS):
        if step == SWITCH:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            schedule = LambdaLR(optimizer, lambda k: math.cos(math.pi * k / (STEPS - SWITCH) / 2))
        loss = loss_of(model, spectra(step)[rank::world])
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 12 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean.item() / world:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
