"""One data set, split once for all ranks; accuracy on the held-out part and on some samples of the training."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split

SAMPLES, FEATURES, CLASSES, PER_RANK, EPOCHS = 150, 12, 4, 8, 4


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build(width=32):
    model = nn.Sequential(
        nn.Linear(FEATURES, width), Residual(width), Residual(width), nn.LayerNorm(width), nn.Linear(width, CLASSES)
    )
    for layer in model[1:3]:
        fully_shard(layer)
    return fully_shard(model)


def make_data():
    gen = torch.Generator().manual_seed(11)
    centres = torch.randn(CLASSES, FEATURES, generator=gen)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=gen)
    return TensorDataset(centres[labels] + 0.6 * torch.randn(SAMPLES, FEATURES, generator=gen), labels)


@torch.no_grad()
def accuracy(model, dataset):
    """Share of correct answers; every rank computes it on its part of the samples."""
    model.eval()
    own = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    right = sum((model(x).argmax(dim=1) == y).sum() for x, y in DataLoader(own, batch_size=10))
    dist.all_reduce(right)
    model.train()
    return right.item() / len(dataset)


def main():
    dist.init_process_group("gloo")
    train_set, held_out = random_split(make_data(), [102, 48], generator=torch.Generator().manual_seed(5))
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    sampler = DistributedSampler(train_set, seed=7)  # pads the last samples of an epoch with the first
    loader = DataLoader(train_set, batch_size=PER_RANK, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            known = accuracy(model, Subset(train_set, range(20)))
            unseen = accuracy(model, held_out)
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {loss.item():.4f} accuracy {known:.3f} held out {unseen:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
