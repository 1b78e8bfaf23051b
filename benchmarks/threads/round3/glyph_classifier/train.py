"""Train a small convolutional classifier on rendered glyphs, sharded with FSDP2."""
import argparse
import os
from typing import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

NUM_CLASSES = 8
SIDE = 16


def render_glyphs(count: int, seed: int) -> TensorDataset:
    """Strokes at a class dependent angle and curvature, shifted, scaled and noised."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % NUM_CLASSES
    grid = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    shift = (torch.rand(count, 2, 1, 1, generator=g) - 0.5) * 0.8
    angle = labels.float() * torch.pi / NUM_CLASSES + 0.12 * torch.randn(count, generator=g)
    curve = ((labels % 3).float() - 1.0) * 0.7
    u = x - shift[:, 0]
    v = y - shift[:, 1]
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    along, across = u * cos + v * sin, v * cos - u * sin
    ink = torch.exp(-((across - curve[:, None, None] * along**2) ** 2) / 0.02) * (along.abs() < 0.8)
    noise = 0.35 * torch.randn(count, SIDE, SIDE, generator=g)
    return TensorDataset((ink + noise).unsqueeze(1), labels)


class ConvUnit(nn.Module):
    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, cout)
        self.skip = nn.Conv2d(cin, cout, 1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x))) + self.skip(x)


class GlyphNet(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.units = nn.Sequential(
            ConvUnit(1, width, 1), ConvUnit(width, 2 * width, 2), ConvUnit(2 * width, 4 * width, 2)
        )
        self.fc = nn.Linear(4 * width, NUM_CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.units(x).mean(dim=(2, 3)))


class Trainable:
    """Owns the model, the loaders and the epoch loop of one task."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = GlyphNet(args.width).to(device)
        for unit in self.model.units:
            fully_shard(unit)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        self.criterion: Callable = nn.CrossEntropyLoss()
        self.train_sampler, self.train_loader = self._loader(render_glyphs(args.train_size, args.seed), True)
        _, self.val_loader = self._loader(render_glyphs(args.val_size, args.seed + 1), False)

    def _loader(self, data: TensorDataset, shuffle: bool):
        sampler = DistributedSampler(data, self.world, self.rank, shuffle=shuffle, seed=self.args.seed)
        return sampler, DataLoader(data, batch_size=self.args.batch // self.world, sampler=sampler, drop_last=shuffle)

    def _mean(self, total: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(total)
        return total / self.world

    def _train_epoch(self, epoch: int) -> float:
        self.model.train()
        running = 0.0
        for i, (images, labels) in enumerate(self.train_loader):
            images, labels = images.to(self.device), labels.to(self.device)
            loss = self.criterion(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            value = self._mean(loss.detach().clone()).item()
            running += value
            if self.rank == 0:
                print(f"epoch {epoch} batch {i} loss {value:.6f}", flush=True)
        return running / len(self.train_loader)

    @torch.no_grad()
    def _validate(self) -> tuple[float, float]:
        self.model.eval()
        sums = torch.zeros(3, device=self.device)
        for images, labels in self.val_loader:
            logits = self.model(images.to(self.device))
            labels = labels.to(self.device)
            sums[0] += nn.functional.cross_entropy(logits, labels, reduction="sum")
            sums[1] += (logits.argmax(1) == labels).sum()
            sums[2] += labels.numel()
        dist.all_reduce(sums)
        return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()

    def fit(self) -> None:
        for epoch in range(self.args.epochs):
            self.train_sampler.set_epoch(epoch)
            train_loss = self._train_epoch(epoch)
            val_loss, accuracy = self._validate()
            if self.rank == 0:
                print(f"== epoch {epoch} train {train_loss:.6f} val {val_loss:.6f} acc {accuracy:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32, help="global batch size")
    parser.add_argument("--train-size", type=int, default=256)
    parser.add_argument("--val-size", type=int, default=128)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=17)
    args = parser.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    Trainable(args, device).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
