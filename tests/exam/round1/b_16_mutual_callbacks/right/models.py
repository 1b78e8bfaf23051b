from torch import nn


class ConvPeer(nn.Module):
    def __init__(self, classes, ch=16):
        super().__init__()
        self.stem = nn.Conv2d(1, ch, 3, stride=2, padding=1)
        self.units = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, ch), nn.ReLU(), nn.Conv2d(ch, ch, 3, padding=1)) for _ in range(2)
        )
        self.head = nn.Linear(ch * 25, classes)

    def forward(self, x):
        x = self.stem(x)
        for u in self.units:
            x = x + u(x)
        return self.head(x.flatten(1))


class MLPPeer(nn.Module):
    def __init__(self, classes, w=40):
        super().__init__()
        self.inp = nn.Linear(100, w)
        self.units = nn.ModuleList(nn.Sequential(nn.LayerNorm(w), nn.Linear(w, w), nn.GELU()) for _ in range(2))
        self.head = nn.Linear(w, classes)

    def forward(self, x):
        h = self.inp(x.flatten(1))
        for u in self.units:
            h = h + u(h)
        return self.head(h)
