import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Stage(nn.Module):
    """A layer with a local classifier; learns from its own loss only and passes on a detached output."""

    def __init__(self, i, o, classes):
        super().__init__()
        self.fc, self.norm, self.probe = nn.Linear(i, o), nn.LayerNorm(o), nn.Linear(o, classes)

    def forward(self, x, y):
        h = F.gelu(self.norm(self.fc(x)))
        return h.detach(), F.cross_entropy(self.probe(h), y)


class GreedyStack:
    """Not a module: a list of separate FSDP roots, each with its own optimizer."""

    def __init__(self, dims, classes, lr):
        self.stages = [fully_shard(Stage(i, o, classes)) for i, o in zip(dims, dims[1:])]
        self.opts = [torch.optim.AdamW(s.parameters(), lr=lr / (1 + k)) for k, s in enumerate(self.stages)]

    def train_on(self, x, y):
        losses = []
        for stage, opt in zip(self.stages, self.opts):
            x, loss = stage(x, y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
        return torch.stack(losses)
