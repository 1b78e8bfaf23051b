"""A denoising diffusion model in bfloat16: time steps stay whole numbers until the embedding has taken their sine."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

FEATURES, WIDTH, BLOCKS, TIMES = 24, 48, 3, 1000
GLOBAL_BATCH, SAMPLES, STEPS = 32, 512, 20


class TimeEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, time, dtype):
        rates = torch.exp(-math.log(TIMES) * torch.arange(WIDTH // 2, dtype=torch.float32) / (WIDTH // 2))
        angles = time.float()[:, None] * rates
        return self.project(torch.cat([angles.sin(), angles.cos()], dim=1).to(dtype))


class DenoisingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = TimeEmbedding()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, time):
        h = self.norm(x) + self.embed(time, x.dtype)
        return x + self.down(F.silu(self.up(h)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(DenoisingBlock() for _ in range(BLOCKS))
        self.outward = nn.Linear(WIDTH, FEATURES)

    def forward(self, noisy, time):
        x = self.inward(noisy)
        for block in self.blocks:
            x = block(x, time)
        return self.outward(x)


def make_data():
    """Points on a few curves, with the noise and the time step that each is trained with."""
    gen = torch.Generator().manual_seed(5)
    phase = torch.rand(SAMPLES, 1, generator=gen) * 2 * math.pi
    clean = torch.sin(phase * torch.arange(1, FEATURES + 1) / 4)
    noise = torch.randn(SAMPLES, FEATURES, generator=gen)
    time = torch.randint(0, TIMES, (SAMPLES,), generator=gen)
    return clean, noise, time


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Denoiser()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    inner = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    clean, noise, time = make_data()
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        at = slice(step * GLOBAL_BATCH % SAMPLES + rank * local, step * GLOBAL_BATCH % SAMPLES + (rank + 1) * local)
        keep = torch.cos(time[at] / TIMES * math.pi / 2)[:, None]
        noisy = keep * clean[at] + (1 - keep**2).sqrt() * noise[at]
        loss = F.mse_loss(model(noisy, time[at]), noise[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
