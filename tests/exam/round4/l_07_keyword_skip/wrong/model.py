import torch.nn as nn


class TDNN(nn.Module):
    def __init__(self, bins=16, ch=24, classes=6):
        super().__init__()
        self.inp = nn.Conv1d(bins, ch, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, ch), nn.ReLU(), nn.Conv1d(ch, ch, 3, padding=1, stride=2)) for _ in range(2))
        self.out = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(ch * 3, classes))

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = b(x)
        return self.out(x)
