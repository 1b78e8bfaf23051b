import torch
import torch.nn as nn


class Policy(nn.Module):
    def __init__(self, vocab=12, dim=32):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.out(h)
