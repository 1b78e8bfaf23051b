"""Sequence labelling (BIO tags) with gradient accumulation; gradients are reduced once per optimizer step."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

VOCAB, TAGS, LENGTH = 50, 5, 12


class Tagger(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.lstm = nn.LSTM(dim, dim, bidirectional=True, batch_first=True)
        self.mid = nn.Sequential(nn.Linear(2 * dim, 2 * dim), nn.ReLU())
        self.tag = nn.Linear(2 * dim, TAGS, bias=False)

    def forward(self, words):
        h, _ = self.lstm(self.emb(words))
        return self.tag(self.mid(h))


def make_dataset(n):
    g = torch.Generator().manual_seed(2)
    words = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    kind = words % 3                                    # 0: outside, 1 and 2: two entity types
    first = torch.ones_like(kind, dtype=torch.bool)
    first[:, 1:] = kind[:, 1:] != kind[:, :-1]
    tags = torch.where(kind == 0, 0, kind * 2 - first.long())
    return words, tags


def micro_batches(data, epoch, size, rank, world):
    """Yields (index, words, tags): this rank's part of each micro-batch of the epoch."""
    words, tags = data
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(70 + epoch))
    for i in range(len(words) // size):
        idx = order[i * size:(i + 1) * size][rank::world]
        yield i, words[idx], tags[idx]


def train_epoch(model, opt, data, epoch, args, rank, world):
    n = len(data[0]) // args.micro_batch
    total = torch.zeros(())
    for i, words, tags in micro_batches(data, epoch, args.micro_batch, rank, world):
        last = (i + 1) % args.accum == 0 or i + 1 == n
        window = min(args.accum, n - i // args.accum * args.accum)
        model.set_requires_gradient_sync((i + 1) % args.accum == 0)
        loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten())
        (loss / window).backward()
        total += loss.detach()
        if last:
            opt.step()
            opt.zero_grad()
    dist.all_reduce(total)
    return total.item() / (n * world)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--micro-batch", type=int, default=16)
    ap.add_argument("--accum", type=int, default=3)
    ap.add_argument("--lr", type=float, default=1e-2)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = Tagger()
    fully_shard(model.emb)
    fully_shard(model.mid)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = make_dataset(128)
    for epoch in range(args.epochs):
        loss = train_epoch(model, opt, data, epoch, args, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
