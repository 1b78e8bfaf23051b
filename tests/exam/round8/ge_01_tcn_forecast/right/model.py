import torch
import torch.nn as nn
import torch.nn.functional as F


class CausalBlock(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.dilation = dilation
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv1d(width, 2 * width, 3, dilation=dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x):
        h = F.pad(self.norm(x), (2 * self.dilation, 0))
        a, b = self.conv(h).chunk(2, dim=1)
        return x + self.out(torch.tanh(a) * torch.sigmoid(b))


class Forecaster(nn.Module):
    """Dilated causal convolutions; predicts the next `horizon` values."""

    def __init__(self, width=32, levels=4, horizon=8):
        super().__init__()
        self.inp = nn.Conv1d(1, width, 1)
        self.blocks = nn.ModuleList(CausalBlock(width, 2**i) for i in range(levels))
        self.head = nn.Linear(width, horizon)

    def forward(self, x):
        h = self.inp(x.unsqueeze(1))
        for block in self.blocks:
            h = block(h)
        return self.head(h[:, :, -1])
