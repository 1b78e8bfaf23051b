import torch
import torch.nn as nn
import torch.nn.functional as F


class ScaledBlock(nn.Module):
    """Residual block without normalisation, with a learned gain on the branch."""

    def __init__(self, ch, alpha=0.5):
        super().__init__()
        self.alpha = alpha
        self.c1 = nn.Conv3d(ch, ch, (1, 3, 3), padding=(0, 1, 1))
        self.c2 = nn.Conv3d(ch, ch, (3, 1, 1), padding=(1, 0, 0))
        self.scale = nn.Parameter(torch.full((ch,), 0.5))

    def forward(self, x):
        h = self.c2(F.gelu(self.c1(F.gelu(x))))
        return x + self.alpha * h * self.scale[:, None, None, None]


class VideoNet(nn.Module):
    def __init__(self, classes=6, ch=16, depth=3):
        super().__init__()
        self.stem = nn.Conv3d(1, ch, (1, 3, 3), stride=(1, 2, 2), padding=(0, 1, 1))
        self.blocks = nn.ModuleList([ScaledBlock(ch) for _ in range(depth)])
        self.head = nn.Linear(ch, classes)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(F.gelu(x).mean((2, 3, 4)))


def clips(step, batch):
    """Moving dots: the class is the direction of the motion."""
    g = torch.Generator().manual_seed(77 + step)
    y = torch.randint(0, 6, (batch,), generator=g)
    angle = y * (2 * torch.pi / 6)
    start = torch.rand(batch, 2, generator=g) * 10
    grid = torch.arange(10.0)
    frames = []
    for t in range(4):
        cx = (start[:, 0] + 1.5 * t * angle.cos()) % 10
        cy = (start[:, 1] + 1.5 * t * angle.sin()) % 10
        d = (grid[None, None, :] - cx[:, None, None]) ** 2 + (grid[None, :, None] - cy[:, None, None]) ** 2
        frames.append(torch.exp(-d / 2))
    x = torch.stack(frames, 1)[:, None]
    x = x + 2.0 * y[:, None, None, None, None] / 6 * torch.ones_like(x)
    return x + 0.1 * torch.randn(x.shape, generator=g), y
