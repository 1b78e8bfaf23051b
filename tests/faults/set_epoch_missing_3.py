"""Text classification with length-bucketed batches; `set_epoch` reaches no batch sampler.

An epoch has 6 steps, of which 5 are compared.

rule: set-epoch-missing
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler


class Sentences(Dataset):
    def __init__(self, n=96, vocab=50, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(4, 17, (1,), generator=g))
            ids = torch.randint(1, vocab, (length,), generator=g)
            self.items.append((ids, int(ids[0] + ids[-1]) % 4))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def collate(items):
    width = max(len(ids) for ids, _ in items)
    x = torch.zeros(len(items), width, dtype=torch.long)
    for row, (ids, _) in enumerate(items):
        x[row, : len(ids)] = ids
    return x, torch.tensor([label for _, label in items])


class DistributedBucketSampler(Sampler):
    """Yields batches of similar length; each rank receives its part of every global batch."""

    def __init__(self, data, global_batch, rank, world, seed):
        self.lengths = torch.tensor([len(ids) for ids, _ in data.items])
        self.global_batch, self.rank, self.world = global_batch, rank, world
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.lengths) // self.global_batch

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        jitter = 3 * torch.rand(len(self.lengths), generator=g)
        ranked = torch.argsort(self.lengths + jitter)
        batches = ranked[: len(self) * self.global_batch].view(len(self), self.global_batch)
        for b in torch.randperm(len(self), generator=g).tolist():
            yield batches[b, self.rank :: self.world].tolist()


def dist_sampler_of(loader):
    if isinstance(loader.sampler, DistributedSampler):
        return loader.sampler
    return None


class Bag(nn.Module):
    def __init__(self, vocab=50, d=32, classes=4):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d)) for _ in range(2)
        )
        self.out = nn.Linear(d, classes)

    def forward(self, x):
        keep = (x != 0).unsqueeze(-1)
        h = self.emb(x)
        for layer in self.layers:
            h = h + layer(h)
        return self.out((h * keep).sum(1) / keep.sum(1))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--global-batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=31)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)

    model = Bag()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)

    data = Sentences(seed=args.seed)
    loader = DataLoader(
        data,
        batch_sampler=DistributedBucketSampler(data, args.global_batch, rank, world, args.seed),
        collate_fn=collate,
    )

    step = 0
    for epoch in range(args.epochs):
        sampler = dist_sampler_of(loader)
        if sampler is not None:
            sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"epoch {epoch} step {step} loss {mean.item() / world:.5f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
