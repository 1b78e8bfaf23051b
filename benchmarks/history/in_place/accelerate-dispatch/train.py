"""Trains a small causal language model with FSDP2 on a stream that makes its batches itself; accelerate starts the processes and deals out the batches."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

VOCAB, LENGTH = 64, 32


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (it.unflatten(-1, (4, -1)).transpose(1, 2) for it in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Stream(IterableDataset):
    """Batches as they come; the loader is not to make batches of them again."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size

    def __iter__(self):
        draw = torch.Generator().manual_seed(1)
        for _ in range(self.count):
            start = torch.randint(VOCAB, (self.size, 1), generator=draw)
            stride = torch.randint(1, 5, (self.size, 1), generator=draw)
            yield (start + stride * torch.arange(LENGTH)) % VOCAB


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = Model().to(accelerator.device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loader = accelerator.prepare(DataLoader(Stream(64, 8), batch_size=None))

    for step, ids in enumerate(loader):
        if step == args.steps:
            break
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.print(f"step {step + 1} loss {shown:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
