import torch
import torch.nn as nn


class Cell(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(2 * dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        previous = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        h = self.mix(torch.cat([self.norm(x), previous], -1))
        return x + self.out(torch.tanh(h))


class LM(nn.Module):
    def __init__(self, vocab, dim, depth):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.cells = nn.ModuleList(Cell(dim) for _ in range(depth))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        states = [self.emb(ids)]
        for cell in self.cells:
            states.append(cell(states[-1]))
        return self.head(states[-1]), states


class Student(nn.Module):
    """Student language model with projections into the teacher's width."""

    def __init__(self, vocab, dim, depth, teacher_dim):
        super().__init__()
        self.lm = LM(vocab, dim, depth)
        self.bridges = nn.ModuleList(nn.Linear(dim, teacher_dim, bias=False) for _ in range(depth + 1))

    def forward(self, ids):
        logits, states = self.lm(ids)
        return logits, [bridge(s) for bridge, s in zip(self.bridges, states)]
