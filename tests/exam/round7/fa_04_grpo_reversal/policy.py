import torch
import torch.nn as nn


class RecurrentLM(nn.Module):
    """A small recurrent language model; `forward` reads a whole sequence and returns logits for each position."""

    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.inp = nn.Linear(dim, dim)
        self.rec = nn.Linear(dim, dim, bias=False)
        self.head = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, vocab))

    def forward(self, ids):
        x = self.inp(self.embed(ids))
        h = torch.zeros_like(x[:, 0])
        states = []
        for t in range(x.shape[1]):
            h = torch.tanh(x[:, t] + self.rec(h))
            states.append(h)
        return self.head(torch.stack(states, 1))
