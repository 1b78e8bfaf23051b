"""Contrastive pre-training on two noisy views of synthetic signals (NT-Xent loss)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_f
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class SignalPairs(Dataset):
    """Two views of each signal: fixed crops, with noise that depends on the sample only."""

    def __init__(self, n=64, length=24, crop=16, classes=8, seed=0):
        gen = torch.Generator().manual_seed(seed)
        self.crop = crop
        self.label = torch.randint(classes, (n,), generator=gen)
        waves = torch.randn(classes, length, generator=gen)
        self.signal = waves[self.label] + 0.4 * torch.randn(n, length, generator=gen)
        self.noise = 0.2 * torch.randn(n, 2, crop, generator=gen)

    def __len__(self):
        return len(self.signal)

    def __getitem__(self, i):
        x = self.signal[i]
        first = x[:self.crop] + self.noise[i, 0]
        second = x[-self.crop:] + self.noise[i, 1]
        return first, second


class ResidualMLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class SimCLR(nn.Module):
    def __init__(self, crop=16, width=32, proj=16, depth=2):
        super().__init__()
        self.stem = nn.Linear(crop, width)
        self.blocks = nn.ModuleList(ResidualMLP(width) for _ in range(depth))
        self.projector = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, proj))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.projector(x)


class NTXent(nn.Module):
    """Loss over the pairs of all ranks; all_gather with gradients joins the embeddings."""

    def __init__(self, temperature=0.5):
        super().__init__()
        self.temperature = temperature

    def forward(self, z_i, z_j):
        z_i = torch.cat(dist_f.all_gather(z_i.contiguous()))
        z_j = torch.cat(dist_f.all_gather(z_j.contiguous()))
        n = len(z_i)
        z = F.normalize(torch.cat([z_i, z_j]), dim=1)
        sim = z @ z.T / self.temperature
        sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=z.device), float("-inf"))
        target = (torch.arange(2 * n, device=z.device) + n) % (2 * n)
        return F.cross_entropy(sim, target)


def train(args, loader, model, criterion, optimizer, device):
    loss_epoch = 0.0
    for step, (x_i, x_j) in enumerate(loader):
        optimizer.zero_grad()
        z_i, z_j = model(torch.cat([x_i, x_j]).to(device)).chunk(2)
        loss = criterion(z_i, z_j)
        loss.backward()
        optimizer.step()
        loss_epoch += loss.item()
    return loss_epoch / len(loader)


@torch.no_grad()
def evaluate(model, criterion, device):
    data = SignalPairs(n=64, seed=1)
    data.signal = data.signal[dist.get_rank()::dist.get_world_size()]
    data.noise = data.noise[dist.get_rank()::dist.get_world_size()]
    pairs = [data[i] for i in range(len(data))]
    x = torch.cat([torch.stack(v) for v in zip(*pairs)]).to(device)
    return criterion(*model(x).chunk(2)).item()


def main():
    parser = argparse.ArgumentParser(description="SimCLR")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)

    dataset = SignalPairs()
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True,
                                 seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size // world, sampler=sampler,
                        drop_last=True)

    model = SimCLR().to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    criterion = NTXent()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss_epoch = train(args, loader, model, criterion, optimizer, device)
        scheduler.step()
        if rank == 0:
            print(f"Epoch [{epoch}/{args.epochs}]  Loss: {loss_epoch:.6f}", flush=True)
    loss = evaluate(model, criterion, device)
    if rank == 0:
        print(f"loss on unseen pairs: {loss:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
