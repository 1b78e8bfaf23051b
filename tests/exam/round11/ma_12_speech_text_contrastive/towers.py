import torch
import torch.nn as nn
import torch.nn.functional as F


class SpeechTower(nn.Module):
    def __init__(self, feats, dim):
        super().__init__()
        self.conv = nn.Conv1d(feats, dim, 4, stride=2)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        h, _ = self.rnn(F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2).contiguous())
        return F.normalize(self.out(h[:, -1]), dim=-1)


class TextTower(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.mix = nn.Sequential(nn.Linear(dim, dim), nn.Tanh())
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, ids):
        weight = torch.linspace(0.5, 1.5, ids.shape[1])[:, None]
        return F.normalize(self.out(self.mix((self.emb(ids) * weight).mean(1))), dim=-1)
