import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from pairs import VOCAB, WIDTH


class Mixer(nn.Module):
    """Causal token mixing by a learned lower-triangular matrix, then a channel MLP."""

    def __init__(self, dim):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.05)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        t = x.size(1)
        x = x + torch.tril(self.mix)[:t, :t] @ self.n1(x)
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self, dim=40, depth=2):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, dim)
        self.body = nn.ModuleList(Mixer(dim) for _ in range(depth))
        self.out = nn.Linear(dim, VOCAB)

    def forward(self, ids, mask):
        x = self.emb(ids[:, :-1])
        for m in self.body:
            x = m(x)
        logp = self.out(x).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return (logp * mask[:, 1:]).sum(-1)


def sharded_lm(seed):
    torch.manual_seed(seed)
    net = LM()
    for m in net.body:
        fully_shard(m)
    return fully_shard(net, reshard_after_forward=True)
