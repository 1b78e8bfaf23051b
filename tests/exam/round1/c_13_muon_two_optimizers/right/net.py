import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class GatedLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.gate, self.val, self.out = (nn.Linear(d, d, bias=False) for _ in range(3))

    def forward(self, x):
        h = self.norm(x)
        return x + self.out(F.silu(self.gate(h)) * self.val(h))


class Net(nn.Module):
    def __init__(self, vocab=40, d=24):
        super().__init__()
        self.a, self.b = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(GatedLayer(d) for _ in range(2))
        self.head = nn.Linear(d, 10)

    def forward(self, pair):
        x = self.a(pair[:, 0]) + self.b(pair[:, 1])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sharded():
    torch.manual_seed(6)
    net = Net()
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)
