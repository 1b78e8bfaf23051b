import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


def data(n=400):
    """Most samples are easy, some (the second region) need another function."""
    g = torch.Generator().manual_seed(30)
    x = torch.randn(n, 7, generator=g)
    hard = x[:, 0] > 1.0
    y = torch.where(hard, (x[:, 1] * x[:, 2]), x[:, 1] + x[:, 3])
    return x, y.unsqueeze(1)


class Gate(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w, self.g = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return x + torch.tanh(self.w(x)) * torch.sigmoid(self.g(x))


def model():
    torch.manual_seed(31)
    net = nn.Sequential(nn.Linear(7, 32), Gate(32), Gate(32), nn.Linear(32, 1))
    fully_shard(net[1])
    fully_shard(net[2], reshard_after_forward=False)
    return fully_shard(net)
