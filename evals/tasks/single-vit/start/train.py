"""Image classification with a small vision transformer, one process."""

import dataclasses
import json
import sys

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass
class Config:
    image: int = 16
    patch: int = 4
    width: int = 48
    heads: int = 3
    depth: int = 3
    classes: int = 10
    batch_size: int = 24
    steps: int = 100
    lr: float = 0.05
    smoothing: float = 0.1
    seed: int = 7
    metrics: str = ""

    @classmethod
    def from_command_line(cls, words):
        """key=value words, as in steps=20"""
        kinds = {field.name: field.type for field in dataclasses.fields(cls)}
        pairs = [word.split("=", 1) for word in words]
        return cls(**{key: {int: int, float: float, str: str}[kinds[key]](value) for key, value in pairs})


class Encoder(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.patches = nn.Conv2d(3, cfg.width, cfg.patch, cfg.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, cfg.width))
        self.place = nn.Parameter(0.02 * torch.randn(1, (cfg.image // cfg.patch) ** 2 + 1, cfg.width))
        self.encoders = nn.ModuleList(Encoder(cfg.width, cfg.heads) for _ in range(cfg.depth))
        self.norm = nn.LayerNorm(cfg.width)
        self.head = nn.Linear(cfg.width, cfg.classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.place
        for encoder in self.encoders:
            x = encoder(x)
        return self.head(self.norm(x[:, 0]))


def make_images(count, cfg):
    """A noisy pattern for each class."""
    gen = torch.Generator().manual_seed(1)
    patterns = torch.randn(cfg.classes, 3, cfg.image, cfg.image, generator=gen)
    labels = torch.randint(0, cfg.classes, (count,), generator=gen)
    return patterns[labels] + 0.5 * torch.randn(count, 3, cfg.image, cfg.image, generator=gen), labels


def main(cfg):
    torch.manual_seed(cfg.seed)
    model = ViT(cfg)
    optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    images, labels = make_images(480, cfg)
    order = torch.randperm(len(images))
    for step in range(cfg.steps):
        at = step * cfg.batch_size % len(images)
        picked = order[at : at + cfg.batch_size]
        logits = model(images[picked])
        loss = F.cross_entropy(logits, labels[picked], label_smoothing=cfg.smoothing)
        accuracy = (logits.argmax(1) == labels[picked]).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        line = json.dumps({"step": step + 1, "loss": loss.item(), "accuracy": accuracy.item()})
        print(line)
        if cfg.metrics:
            with open(cfg.metrics, "a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main(Config.from_command_line(sys.argv[1:]))
