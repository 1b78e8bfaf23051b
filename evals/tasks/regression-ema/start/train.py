"""Regression with a wide residual MLP and an exponential moving average of the weights, in one process."""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


class Regressor(nn.Module):
    def __init__(self, features=10, width=51, depth=4):
        super().__init__()
        self.enter = nn.Linear(features, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.leave = nn.Linear(width, 1)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x).squeeze(-1)


class Average:
    """The moving average of a model's parameters."""

    def __init__(self, model, decay):
        self.decay = decay
        self.values = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            self.values[name].lerp_(p, 1 - self.decay)

    def save(self, path):
        torch.save(self.values, path)


def measurements(count):
    gen = torch.Generator().manual_seed(12)
    x = torch.randn(count, 10, generator=gen)
    return x, torch.sin(x.sum(dim=1)) + 0.5 * x[:, 0] * x[:, 1]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=30)
    parser.add_argument("--decay", type=float, default=0.7)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(2)
    model = Regressor()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    average = Average(model, args.decay)
    x, y = measurements(600)
    log = (args.out / "log.jsonl").open("w")
    for step in range(args.steps):
        picked = torch.arange(step * args.batch, (step + 1) * args.batch) % len(x)
        loss = F.mse_loss(model(x[picked]), y[picked])
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update(model)
        log.write(json.dumps({"step": step + 1, "loss": loss.item(), "norm": norm.item()}) + "\n")
    log.close()
    average.save(args.out / "average.pt")


if __name__ == "__main__":
    main()
