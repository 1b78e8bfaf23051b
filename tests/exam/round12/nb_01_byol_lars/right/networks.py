import copy

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


def mlp(d_in, d_hidden, d_out):
    return nn.Sequential(nn.Linear(d_in, d_hidden), nn.LayerNorm(d_hidden), nn.GELU(), nn.Linear(d_hidden, d_out))


class Encoder(nn.Module):
    def __init__(self, width=32, proj=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, kernel_size=4, stride=4)
        self.mix = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.head = mlp(width, 48, proj)

    def forward(self, x):
        h = torch.relu(self.stem(x))
        h = h + torch.relu(self.mix(h))
        return self.head(h.mean(dim=(2, 3)))


class Online(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.predictor = mlp(16, 32, 16)

    def forward(self, x):
        return self.predictor(self.encoder(x))


def build(seed):
    torch.manual_seed(seed)
    online = Online()
    target = copy.deepcopy(online.encoder).requires_grad_(False)
    for part in (online.encoder.head, online.encoder, online.predictor, online):
        fully_shard(part)
    for part in (target.head, target):
        fully_shard(part, reshard_after_forward=True)
    return online, target


@torch.no_grad()
def move_target(online, target, tau):
    for p, t in zip(online.encoder.parameters(), target.parameters()):
        t.to_local().lerp_(p.to_local(), 1.0 - tau)
