import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class GruLM(nn.Module):
    def __init__(self, vocab=24, dim=20):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.gate = nn.Linear(2 * dim, dim)
        self.cand = nn.Linear(2 * dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.Tanh(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        e = self.emb(ids)
        h = torch.zeros_like(e[:, 0])
        outs = []
        for t in range(ids.shape[1]):
            both = torch.cat([e[:, t], h], -1)
            z = torch.sigmoid(self.gate(both))
            h = z * h + (1 - z) * torch.tanh(self.cand(both))
            outs.append(h)
        h = torch.stack(outs, 1)
        return self.head(h + self.ff(h))


def build():
    torch.manual_seed(1)
    model = GruLM()
    fully_shard(model.ff)
    return fully_shard(model)
