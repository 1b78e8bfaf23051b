import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LEN, DIM = 45, 21, 40


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(DIM, 99, bias=False), nn.Linear(99, DIM, bias=False)
        self.n1, self.n2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x):
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.relu(self.up(self.n2(x))).square())


class LM(nn.Module):
    """Decoder whose output matrix is the embedding."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Parameter(torch.zeros(LEN, DIM))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.emb.weight
        nn.init.normal_(self.emb.weight, std=0.3)

    def forward(self, ids):
        x = self.emb(ids) + self.pos[: ids.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


_rule = torch.randint(0, VOCAB, (VOCAB, 2), generator=torch.Generator().manual_seed(77))


def text(step, n):
    """Sequences of a random two-way automaton."""
    g = torch.Generator().manual_seed(step * 13 + 1)
    ids = torch.randint(0, VOCAB, (n, LEN + 1), generator=g)
    coin = (torch.rand(n, LEN + 1, generator=g) < 0.2).long()
    for t in range(1, LEN + 1):
        ids[:, t] = _rule[ids[:, t - 1], coin[:, t]]
    return ids
