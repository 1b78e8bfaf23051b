"""Trains a small causal language model with FSDP2, evaluating now and then; accelerate starts the processes and shares out the data."""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Subset, TensorDataset

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


def samples(count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    start = torch.randint(VOCAB, (count, 1), generator=draw)
    stride = torch.randint(1, 5, (count, 1), generator=draw)
    return TensorDataset((start + stride * torch.arange(LENGTH)) % VOCAB)


def loss_of(model, ids):
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def evaluate(accelerator, model, optimizer, loader) -> float:
    model.eval()
    optimizer.eval()  # optimizers without schedule (AdamWScheduleFree) keep other weights for it
    losses = [accelerator.reduce(loss_of(model, ids), reduction="mean").item() for (ids,) in loader]
    model.train()
    optimizer.train()
    return sum(losses) / len(losses)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--evaluate-every", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    model = Model().to(accelerator.device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = samples(512)
    optimizer, loader, held_out = accelerator.prepare(
        optimizer,
        DataLoader(Subset(data, range(480)), batch_size=8),
        DataLoader(Subset(data, range(480, 512)), batch_size=8),
    )

    for step, (ids,) in enumerate(loader, start=1):
        loss = loss_of(model, ids)
        accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shown = accelerator.reduce(loss.detach(), reduction="mean").item()
        accelerator.print(f"step {step} loss {shown:.6f}")
        if step % args.evaluate_every == 0:
            accelerator.print(f"step {step} held out {evaluate(accelerator, model, optimizer, held_out):.6f}")
        if step == args.steps:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
