"""Masked image patches with FSDP2, built on the meta device: torchrun --nproc-per-node 2 train.py --steps 50"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

PATCHES, PIXELS, WIDTH = 9, 16, 48


class Encoder(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MaskedPatches(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.enter = nn.Linear(PIXELS, WIDTH)
        self.place = nn.Embedding(PATCHES, WIDTH)
        self.encoders = nn.ModuleList(Encoder() for _ in range(depth))
        self.leave = nn.Linear(WIDTH, PIXELS)

    def forward(self, patches):
        x = self.enter(patches) + self.place(torch.arange(PATCHES))
        for encoder in self.encoders:
            x = encoder(x)
        return self.leave(x)


@torch.no_grad()
def init_weights(model, seed):
    """Normal matrices, module after module from one generator; norms one, biases zero."""
    gen = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.05, generator=gen)
        elif isinstance(module, nn.LayerNorm):
            nn.init.ones_(module.weight)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


def build(seed):
    with torch.device("meta"):
        model = MaskedPatches()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for encoder in model.encoders:
        fully_shard(encoder, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    init_weights(model, seed)
    return model


def main(steps, batch, seed):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    gen = torch.Generator().manual_seed(19)
    basis = torch.randn(4, PATCHES, PIXELS, generator=gen)
    pictures = torch.einsum("nk,kpq->npq", torch.randn(240, 4, generator=gen), basis)
    hidden = torch.rand(240, PATCHES, 1, generator=gen) < 0.4
    for step in range(steps):
        mine = (torch.arange(batch) + step * batch).remainder(240).chunk(world)[rank]
        loss = F.mse_loss(model(pictures[mine].masked_fill(hidden[mine], 0.0)), pictures[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
