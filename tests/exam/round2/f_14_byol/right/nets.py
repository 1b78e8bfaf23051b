import copy

import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Branch(nn.Module):
    def __init__(self, predictor):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv1d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv1d(12, 12, 5, padding=2), nn.ReLU())
        self.proj = nn.Linear(12, 16)
        self.pred = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) if predictor else None

    def forward(self, x):
        z = self.proj(self.enc(x).mean(-1))
        return z if self.pred is None else self.pred(z)


def make_pair():
    torch.manual_seed(0)
    online, target = Branch(True), Branch(False)
    target.load_state_dict({k: copy.copy(v) for k, v in online.state_dict().items() if not k.startswith("pred.")})
    target.requires_grad_(False)
    for net in (online, target):
        fully_shard(net.enc)
        fully_shard(net)
    return online, target


@torch.no_grad()
def follow(target, online, tau):
    online.reshard()
    target.reshard()
    source = dict(online.named_parameters())
    for name, p in target.named_parameters():
        p.lerp_(source[name], 1 - tau)
