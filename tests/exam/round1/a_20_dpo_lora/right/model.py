import torch
import torch.nn as nn

VOCAB, LENGTH = 22, 14


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.gru = nn.GRU(d, d, batch_first=True)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        x = x + self.gru(self.norm(x))[0]
        return x + self.down(torch.relu(self.up(x)))


class Policy(nn.Module):
    def __init__(self, d=28):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.layers = nn.ModuleList([Layer(d), Layer(d)])
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
