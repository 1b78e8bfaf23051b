"""Shares of different length, cut to the shortest; a batch with a bad sample is skipped by all ranks together."""

from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

FEATURES, WIDTH, DEPTH = 8, 24, 3
GLOBAL_BATCH, SAMPLES = 32, 1024


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * width)
        self.fc2 = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Regressor(nn.Module):
    def __init__(self, inputs=FEATURES, width=WIDTH, depth=DEPTH):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def make_dataset():
    gen = torch.Generator().manual_seed(11)
    x = torch.randn(SAMPLES, FEATURES, generator=gen)
    direction = torch.randn(FEATURES, generator=gen)
    y = torch.sin(x @ direction) + x[:, :4].sum(dim=1)
    y[37] = float("inf")  # a bad sample
    return x, y[:, None]


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Regressor()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    x, y = make_dataset()
    share = TensorDataset(x[rank : SAMPLES - 40 * rank : world], y[rank : SAMPLES - 40 * rank : world])
    loader = DataLoader(share, batch_size=GLOBAL_BATCH // world, drop_last=True)
    batches = torch.tensor(len(loader))
    dist.all_reduce(batches, op=dist.ReduceOp.MIN)
    for step, (inputs, targets) in enumerate(islice(loader, int(batches))):
        loss = F.mse_loss(model(inputs), targets)
        good = torch.isfinite(loss.detach()).float()
        dist.all_reduce(good, op=dist.ReduceOp.MIN)
        if not good:
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = mean_over_ranks(loss)
        if rank == 0:
            print(f"step {step + 1} loss {shown:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
