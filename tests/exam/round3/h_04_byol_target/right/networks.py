import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Encoder(nn.Module):
    def __init__(self, d_in=36, d=32, out=16):
        super().__init__()
        self.l1, self.n1 = nn.Linear(d_in, d), nn.LayerNorm(d)
        self.l2, self.n2 = nn.Linear(d, d), nn.LayerNorm(d)
        self.proj = nn.Linear(d, out)

    def forward(self, x):
        x = F.gelu(self.n1(self.l1(x)))
        return self.proj(F.gelu(self.n2(self.l2(x))))


class Online(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.predictor = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x):
        return self.predictor(self.encoder(x))


def build():
    online, target = Online(), Encoder()
    target.requires_grad_(False)
    fully_shard(online.encoder)
    fully_shard(online)
    fully_shard(target, reshard_after_forward=True)
    return online, target
