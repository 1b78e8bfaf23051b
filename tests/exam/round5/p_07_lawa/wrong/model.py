import torch
import torch.nn as nn


class GRULayer(nn.Module):
    """Minimal gated recurrence with a parallel input projection."""

    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.zh = nn.Linear(d, 2 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x):
        z, h = self.zh(self.norm(x)).chunk(2, -1)
        z = torch.sigmoid(z)
        state, ys = torch.zeros_like(h[:, 0]), []
        for t in range(x.shape[1]):
            state = (1 - z[:, t]) * state + z[:, t] * torch.tanh(h[:, t])
            ys.append(state)
        return x + self.out(torch.stack(ys, 1))


class RNNLM(nn.Module):
    def __init__(self, vocab, d=24, depth=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(GRULayer(d) for _ in range(depth))
        self.head = nn.Linear(d, vocab)

    def forward(self, x):
        h = self.emb(x)
        for l in self.layers:
            h = l(h)
        return self.head(h)
