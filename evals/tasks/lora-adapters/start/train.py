"""Fine-tunes low-rank adapters on a frozen base model, one process."""

import argparse
import math

import torch
import torch.nn.functional as F
from textdata import LENGTH, VOCAB, batch_of, sequences
from tinygpt import GPT, Config
from torch import nn


class LoRA(nn.Module):
    """A frozen linear layer plus a trained product of two thin matrices."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * self.scale


def add_adapters(model, rank, alpha):
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "up", "down"):
            setattr(block, name, LoRA(getattr(block, name), rank, alpha))
    return model


def adapter_state(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--alpha", type=float, default=8.0)
    parser.add_argument("--adapter", default="adapter.pt", help="where the trained adapters are written")
    args = parser.parse_args()

    torch.manual_seed(0)
    base = GPT(Config(vocab=VOCAB, length=LENGTH))
    model = add_adapters(base, args.rank, args.alpha)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    inputs, targets = sequences(256, seed=9)
    for step in range(args.steps):
        picked = batch_of(step, args.batch, len(inputs))
        loss = F.cross_entropy(model(inputs[picked]).flatten(0, 1), targets[picked].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        print(f"step {step + 1} loss {loss.item():.4f}")
    torch.save(adapter_state(model), args.adapter)


if __name__ == "__main__":
    main()
