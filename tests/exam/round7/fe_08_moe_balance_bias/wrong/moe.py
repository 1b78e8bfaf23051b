import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    """Top-k mixture with balancing by a routing bias instead of an auxiliary loss.

    The bias only decides which experts are chosen; the mixing weights come from the scores alone.
    """

    def __init__(self, dim, hidden, experts, top_k):
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, experts, bias=False)
        self.w1 = nn.Parameter(torch.empty(experts, dim, hidden))
        self.w2 = nn.Parameter(torch.empty(experts, hidden, dim))
        nn.init.normal_(self.w1, std=dim ** -0.5)
        nn.init.normal_(self.w2, std=hidden ** -0.5)
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts))

    def forward(self, x):
        scores = torch.sigmoid(self.router(x))
        chosen = (scores.detach() + self.bias).topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        if self.training:
            self.load += mask.flatten(0, -2).sum(0)
        gate = scores * mask
        gate = gate / gate.sum(-1, keepdim=True)
        h = F.silu(torch.einsum("btd,edh->bteh", x, self.w1))
        y = torch.einsum("bteh,ehd->bted", h, self.w2)
        return x + (gate.unsqueeze(-1) * y).sum(2)


class MoELM(nn.Module):
    def __init__(self, vocab=40, dim=24, hidden=32, experts=6, top_k=2, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.layers = nn.ModuleList(MoE(dim, hidden, experts, top_k) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x, _ = self.rnn(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
