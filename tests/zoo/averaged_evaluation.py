"""An averaged model with the buffers of the trained one; a preview gives its weights to the trained model and restores them."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES, WIDTH, BLOCKS = 12, 32, 2
GLOBAL_BATCH, SAMPLES, STEPS, EVERY = 32, 512, 20, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


class Regressor(nn.Module):
    """Scales its inputs by statistics of the data that it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("std", torch.ones(FEATURES))
        self.inward = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.outward = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.inward((x - self.mean) / self.std)
        for block in self.blocks:
            x = block(x)
        return self.outward(x).squeeze(-1)

    @torch.no_grad()
    def see(self, x):
        sums = torch.stack([x.sum(0), x.square().sum(0)])
        dist.all_reduce(sums)
        mean, square = sums / GLOBAL_BATCH
        self.mean.lerp_(mean, 0.1)
        self.std.lerp_((square - mean.square()).sqrt(), 0.1)


def build(mesh):
    torch.manual_seed(0)
    model = Regressor()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@torch.no_grad()
def update(average, model):
    for mean, param in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(param.detach(), 0.1)
    for mean, buffer in zip(average.buffers(), model.buffers(), strict=True):
        mean.copy_(buffer)


@contextmanager
def averaged_weights(model, average):
    with torch.no_grad():
        kept = {name: p.detach().to_local().clone() for name, p in model.named_parameters()}
        for param, mean in zip(model.parameters(), average.parameters(), strict=True):
            param.copy_(mean)
    yield
    model.reshard()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.to_local().copy_(kept[name])


@torch.no_grad()
def evaluate(model, inputs, targets):
    rank, world = dist.get_rank(), dist.get_world_size()
    total = F.mse_loss(model(inputs.chunk(world)[rank]), targets.chunk(world)[rank], reduction="sum")
    dist.all_reduce(total)
    return total.item() / len(targets)


def make_data():
    gen = torch.Generator().manual_seed(3)
    inputs = 4.0 + 3.0 * torch.randn(SAMPLES + 64, FEATURES, generator=gen)
    return inputs, (inputs[:, 0] - inputs[:, 1]).tanh() + 0.1 * inputs[:, 2]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model, average = build(mesh), build(mesh)
    average.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    inputs, targets = make_data()
    local = GLOBAL_BATCH // world
    for step in range(STEPS):
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        x, y = inputs[start : start + local], targets[start : start + local]
        model.see(x)
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update(average, model)
        if (step + 1) % EVERY == 0:
            with averaged_weights(model, average):
                preview = evaluate(model, inputs[SAMPLES:], targets[SAMPLES:])
            if rank == 0:
                print(f"step {step + 1} averaged {preview:.4f}", flush=True)
    final = evaluate(average, inputs[SAMPLES:], targets[SAMPLES:])
    if rank == 0:
        print(f"averaged model {final:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
