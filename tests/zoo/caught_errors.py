"""Errors that are caught by design: a read that is repeated, a bad batch, early stopping by a class of the script."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES, WIDTH, DEPTH = 8, 24, 3
GLOBAL_BATCH, SAMPLES, STEPS = 32, 1024, 20


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
    return x, y[:, None]


class StopTraining(Exception):
    pass


def read(x, y, step, start, local):
    for attempt in range(3):
        try:
            if attempt == step % 2:
                return x[start : start + local], y[start : start + local]
            raise OSError("the file system does not answer")
        except OSError as error:
            print(f"step {step + 1}, attempt {attempt + 1}: {error}", flush=True)
    raise StopTraining


def checked(targets, step):
    """All ranks meet the same bad batches."""
    if step in (3, 12):
        raise ValueError("a sample that cannot be decoded")
    return targets


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
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    x, y = make_dataset()
    try:
        train(model, optimizer, x, y, rank, GLOBAL_BATCH // world)
    except StopTraining:
        print("done: the loss is low enough", flush=True)
    dist.destroy_process_group()


def train(model, optimizer, x, y, rank, local):
    for step in range(STEPS):
        start = step * GLOBAL_BATCH % SAMPLES + rank * local
        try:
            inputs, targets = read(x, y, step, start, local)
            targets = checked(targets, step)
        except ValueError as error:
            print(f"step {step + 1} is left out: {error}", flush=True)
            continue
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = mean_over_ranks(loss)
        if rank == 0:
            print(f"step {step + 1} loss {shown:.4f}", flush=True)
        if step > 14 and shown < 100:
            raise StopTraining


if __name__ == "__main__":
    main()
