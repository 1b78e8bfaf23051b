import torch
import torch.nn as nn


class GatedMixer(nn.Module):
    """A gated linear recurrence over time instead of attention."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.forget = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.gate = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        nn.init.constant_(self.forget.bias, 1.0)

    def forward(self, x):
        h = self.norm(x)
        f, v = torch.sigmoid(self.forget(h)), self.value(h)
        state, states = torch.zeros_like(v[:, 0]), []
        for t in range(x.shape[1]):
            state = f[:, t] * state + (1 - f[:, t]) * v[:, t]
            states.append(state)
        return x + self.out(torch.stack(states, 1) * torch.sigmoid(self.gate(h)))


class RecurrentLM(nn.Module):
    def __init__(self, vocab, dim=40, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mixers = nn.ModuleList(GatedMixer(dim) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for mixer in self.mixers:
            x = mixer(x)
        return self.head(self.norm(x).flatten(0, 1))
