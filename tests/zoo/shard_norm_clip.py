"""Clips by a norm of its own: each rank squares its shard where the gradient is a DTensor, and the squares are summed over ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

FEATURES, WIDTH, CLASSES, BLOCKS = 24, 32, 6, 2
GLOBAL_BATCH, SAMPLES, STEPS, MAX_NORM = 32, 512, 20, 0.5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inward = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.outward = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


@torch.no_grad()
def clip_shards(params, max_norm):
    """Every gradient is a shard here, so the square of the whole norm is the sum over ranks."""
    shards = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in params]
    square = torch.stack([shard.square().sum() for shard in shards]).sum()
    dist.all_reduce(square)
    scale = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
    for shard in shards:
        shard.mul_(scale)


def make_data():
    gen = torch.Generator().manual_seed(4)
    centres = torch.randn(CLASSES, FEATURES, generator=gen)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=gen)
    return centres[labels] + 0.6 * torch.randn(SAMPLES, FEATURES, generator=gen), labels


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.2, momentum=0.9)

    inputs, labels = make_data()
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        loss = F.cross_entropy(model(inputs[start : start + local]), labels[start : start + local])
        optimizer.zero_grad()
        loss.backward()
        clip_shards(params, MAX_NORM)
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
