"""Image classification with per-parameter hybrid sharded data parallelism (HSDP2).

    torchrun --standalone --nproc-per-node 4 train.py --optimizer-type SGD --lr 1e-2 --momentum 0.9
    torchrun --standalone --nproc-per-node 4 train.py --optimizer-type ADAM --dp-replicate-degree 2

Parameters are sharded inside a group and replicated between the groups.  The images are
synthetic stand-ins for CIFAR-10 of a smaller size.
"""
import argparse
import logging
import math
import os
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

logging.basicConfig(format="[%(filename)s:%(lineno)d] %(levelname)s: %(message)s", level=logging.INFO)
logger: logging.Logger = logging.getLogger(__name__)

# get local and world rank and world size
LOCAL_RANK = int(os.environ["LOCAL_RANK"])
WORLD_RANK = int(os.environ["RANK"])
WORLD_SIZE = int(os.environ["WORLD_SIZE"])


class SyntheticImages(Dataset):
    def __init__(self, size: int, seed: int, classes: int = 10) -> None:
        g = torch.Generator().manual_seed(99)
        prototypes = torch.randn(classes, 3, 8, 8, generator=g)
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (size,), generator=g)
        self.images = 0.5 * prototypes[self.labels] + torch.randn(size, 3, 8, 8, generator=g)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index], self.labels[index]


class ConvBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)


class ConvNet(nn.Module):
    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(ConvBlock(3, width), ConvBlock(width, 2 * width))
        self.linear = nn.Linear(2 * width * 4, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.features(x).flatten(1))


class LossMetrics:
    """Lifetime and window averages of the loss, local and over all trainers."""

    def __init__(self, window_size: int, device: torch.device) -> None:
        self._window: list[torch.Tensor] = []
        self._window_size = window_size
        self._iteration = 0
        self._lifetime_loss = torch.zeros((), device=device)
        self._global_window_loss = torch.zeros((), device=device)

    def update(self, loss: torch.Tensor) -> None:
        self._iteration += 1
        self._window = (self._window + [loss.detach()])[-self._window_size:]
        self._lifetime_loss += (loss.detach() - self._lifetime_loss) / self._iteration

    def update_global_metrics(self) -> None:
        self._global_window_loss = torch.stack(self._window).mean()
        dist.all_reduce(self._global_window_loss)
        self._global_window_loss /= WORLD_SIZE

    def log_global_metrics(self, epoch: int) -> None:
        logger.info(f"Epoch: {epoch} | Iteration: {self._iteration} | "
                    f"Global Window Loss: {self._global_window_loss.item():.6f}")


def set_seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def setup_distribution(backend: str) -> torch.device:
    dist.init_process_group(backend=backend, rank=WORLD_RANK, world_size=WORLD_SIZE)
    if backend == "nccl":
        torch.cuda.set_device(LOCAL_RANK)
        return torch.device("cuda", LOCAL_RANK)
    return torch.device("cpu")


def create_model_and_optimizer_and_loss_fn(
    args: argparse.Namespace, device: torch.device, device_mesh: DeviceMesh
) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module]:
    model = ConvNet().to(device)
    for block in model.features:
        fully_shard(block, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)

    optimizer: torch.optim.Optimizer
    if args.optimizer_type == "SGD":
        optimizer = torch.optim.SGD(
            model.parameters(), lr=args.lr, momentum=args.momentum, weight_decay=args.weight_decay
        )
    else:
        optimizer = torch.optim.Adam(
            model.parameters(), lr=args.lr, betas=(args.beta1, args.beta2), eps=args.epsilon,
            weight_decay=args.weight_decay,
        )
    return model, optimizer, nn.CrossEntropyLoss()


def train_hybrid_shard_model(
    model: nn.Module,
    loss_function: nn.Module,
    sampler: DistributedSampler,
    data_loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    epochs: int = 1,
    window_size: int = 100,
) -> LossMetrics:
    metrics = LossMetrics(window_size, device)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in data_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            output = model(inputs)
            loss = loss_function(output, labels)
            loss.backward()
            optimizer.step()
            metrics.update(loss)
        metrics.update_global_metrics()
        if WORLD_RANK == 0:
            metrics.log_global_metrics(epoch)
    return metrics


@torch.no_grad()
def accuracy(model: nn.Module, dataset: SyntheticImages, device: torch.device) -> float:
    images = dataset.images[WORLD_RANK::WORLD_SIZE].to(device)
    labels = dataset.labels[WORLD_RANK::WORLD_SIZE].to(device)
    hits = (model(images).argmax(-1) == labels).sum()
    dist.all_reduce(hits)
    return hits.item() / len(dataset)


def get_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer-type", choices=["SGD", "ADAM"], default="ADAM")
    parser.add_argument("--batch-size", type=int, default=32, help="over all trainers")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--window-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--epsilon", type=float, default=1e-8)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=2022)
    parser.add_argument("--backend", default="nccl" if torch.cuda.is_available() else "gloo")
    parser.add_argument("--dp-replicate-degree", type=int, default=math.gcd(2, WORLD_SIZE))
    return parser.parse_args()


if __name__ == "__main__":
    args: argparse.Namespace = get_args()
    set_seed(args.seed)
    device: torch.device = setup_distribution(args.backend)

    # initialize device_mesh for hybrid shard data parallel
    device_mesh: DeviceMesh = init_device_mesh(
        device.type,
        (args.dp_replicate_degree, WORLD_SIZE // args.dp_replicate_degree),
        mesh_dim_names=("dp_replicate", "dp_shard"),
    )
    model, optimizer, loss_fn = create_model_and_optimizer_and_loss_fn(args, device, device_mesh)

    train_set = SyntheticImages(256, seed=1)
    sampler: DistributedSampler = DistributedSampler(
        train_set, num_replicas=WORLD_SIZE, rank=WORLD_RANK, shuffle=True, seed=args.seed
    )
    data_loader: DataLoader = DataLoader(train_set, batch_size=args.batch_size // WORLD_SIZE, sampler=sampler)

    train_hybrid_shard_model(
        model, loss_fn, sampler, data_loader, optimizer, device=device,
        epochs=args.epochs, window_size=args.window_size,
    )
    test_accuracy = accuracy(model, SyntheticImages(128, seed=2), device)
    if WORLD_RANK == 0:
        logger.info(f"Test accuracy: {test_accuracy:.4f}")

    # clean up process group
    dist.destroy_process_group()
