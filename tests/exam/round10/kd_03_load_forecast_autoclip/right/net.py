import torch
import torch.nn as nn


class NBeatsBlock(nn.Module):
    def __init__(self, context, horizon, last, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(context, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.backcast = None if last else nn.Linear(width, context)
        self.forecast = nn.Linear(width, horizon)

    def forward(self, x):
        h = self.body(x)
        return None if self.backcast is None else x - self.backcast(h), self.forecast(h)


class NBeats(nn.Module):
    def __init__(self, context, horizon, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(NBeatsBlock(context, horizon, last=i == blocks - 1) for i in range(blocks))

    def forward(self, x):
        out = 0
        for block in self.blocks:
            x, f = block(x)
            out = out + f
        return out
