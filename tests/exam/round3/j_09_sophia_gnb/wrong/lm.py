import torch.nn as nn

from chars import CONTEXT, VOCAB


class NGramNet(nn.Module):
    def __init__(self, dim=10, hidden=48):
        super().__init__()
        self.table = nn.Embedding(VOCAB, dim)
        self.hidden = nn.Sequential(nn.Linear(CONTEXT * dim, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
        self.out = nn.Linear(hidden, VOCAB)

    def forward(self, ids):
        return self.out(self.hidden(self.table(ids).flatten(1)))
