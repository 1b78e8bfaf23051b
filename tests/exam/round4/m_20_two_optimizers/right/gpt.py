import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(d, 3 * d, bias=False), nn.Linear(3 * d, d, bias=False)
        self.n1, self.n2 = nn.RMSNorm(d), nn.RMSNorm(d)

    def forward(self, x):
        h = self.n1(x)
        x = x + self.o(F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h), is_causal=True))
        return x + self.down(F.relu(self.up(self.n2(x))).square())


class Gpt(nn.Module):
    def __init__(self, vocab=20, d=16, n=2, ctx=10):
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Parameter(torch.zeros(ctx, d))
        self.blocks = nn.ModuleList(Block(d) for _ in range(n))
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def build():
    torch.manual_seed(40)
    model = Gpt()
    for b in model.blocks:
        fully_shard(b, reshard_after_forward=False)
    return fully_shard(model)
