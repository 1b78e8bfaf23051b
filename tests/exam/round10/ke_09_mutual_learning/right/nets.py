import torch
import torch.nn as nn


class GRUNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.rnn = nn.GRU(3, 24, batch_first=True)
        self.fc = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, classes))

    def forward(self, x):
        return self.fc(self.rnn(x)[0].mean(1))

    def parts(self):
        return [self.rnn, self.fc]


class ConvNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(3, 16, 5, padding=2), nn.GELU(), nn.Conv1d(16, 32, 5, stride=2), nn.GELU())
        self.fc = nn.Linear(32, classes)

    def forward(self, x):
        return self.fc(self.body(x.transpose(1, 2)).mean(2))

    def parts(self):
        return [self.body]
