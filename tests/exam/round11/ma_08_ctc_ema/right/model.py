import torch.nn as nn


class Recogniser(nn.Module):
    def __init__(self, feats=10, dim=32, phones=9):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(feats, dim, 3, padding=1), nn.GELU())
        self.rnn = nn.LSTM(dim, dim, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, phones, bias=False)

    def forward(self, feats):
        h = self.front(feats.transpose(1, 2)).transpose(1, 2)
        h, _ = self.rnn(h.contiguous())
        return self.out(h).log_softmax(-1)
