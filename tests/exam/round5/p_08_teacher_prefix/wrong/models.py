import torch.nn as nn


class Res(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))

    def forward(self, x):
        return x + self.net(x)


class Classifier(nn.Module):
    def __init__(self, inp=10, d=32, depth=2, classes=6):
        super().__init__()
        self.stem = nn.Linear(inp, d)
        self.trunk = nn.ModuleList(Res(d) for _ in range(depth))
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        h = self.stem(x)
        for r in self.trunk:
            h = r(h)
        return self.head(h)
