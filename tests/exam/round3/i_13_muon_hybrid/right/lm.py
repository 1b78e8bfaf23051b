import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        a = F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h), is_causal=True)
        x = x + self.o(a)
        return x + self.fc2(F.relu(self.fc1(self.norm2(x))).square())


class LM(nn.Module):
    def __init__(self, vocab=20, dim=16, depth=2, length=14):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def text(step, size, vocab=20, length=14):
    """Copy task: the second half of the sequence repeats the first."""
    g = torch.Generator().manual_seed(60_000 + step)
    half = torch.randint(0, vocab, (size, 2), generator=g)
    return half.repeat(1, length // 2 + 1)[:, : length + 1]
