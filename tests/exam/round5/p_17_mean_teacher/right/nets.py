import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self, d=8, h=24, classes=3):
        super().__init__()
        self.inp = nn.Linear(d, h)
        self.res = nn.ModuleList(nn.Sequential(nn.LayerNorm(h), nn.Linear(h, h), nn.GELU(), nn.Linear(h, h)) for _ in range(2))
        self.out = nn.Linear(h, classes)

    def forward(self, x):
        h = self.inp(x)
        for r in self.res:
            h = h + r(h)
        return self.out(h)


def build(seed):
    torch.manual_seed(seed)
    net = Net()
    for r in net.res:
        fully_shard(r)
    return fully_shard(net, reshard_after_forward=True)


@torch.no_grad()
def follow(teacher, student, decay):
    """Both are sharded in the same way, so the average is a purely local operation."""
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.lerp_(s.detach(), 1 - decay)
