"""Classifies short series with FSDP2: torchrun --nproc-per-node 2 train.py --epochs 2"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, RandomSampler


class Series(Dataset):
    """Noisy waves; the class is the frequency."""

    def __init__(self, count=90, length=32, classes=5):
        gen = torch.Generator().manual_seed(23)
        self.labels = torch.randint(0, classes, (count,), generator=gen)
        phase = 6.28 * torch.rand(count, 1, generator=gen)
        self.values = torch.sin((self.labels[:, None] + 1) * torch.linspace(0, 6.28, length) + phase)
        self.values += 0.2 * torch.randn(count, length, generator=gen)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.values[index], self.labels[index]


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class Network(nn.Module):
    def __init__(self, length=32, width=36, depth=3, classes=5):
        super().__init__()
        self.enter = nn.Linear(length, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.leave = nn.Linear(width, classes)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def make_loader(data, batch):
    order = torch.Generator().manual_seed(0)
    return DataLoader(data, batch_size=batch, sampler=RandomSampler(data, generator=order), drop_last=True)


def main(epochs, batch):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(9)
    model = Network()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = make_loader(Series(), batch)
    for epoch in range(epochs):
        for values, labels in loader:
            loss = F.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1} loss {loss.item():.4f} ({len(loader)} steps)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch", type=int, default=30, help="samples of one optimizer step, over all ranks")
    main(**vars(parser.parse_args()))
