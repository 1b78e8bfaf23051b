import torch
from torch import nn


class Mixer(nn.Module):
    """Depthwise temporal convolution and a pointwise MLP."""

    def __init__(self, dim, kernel=5):
        super().__init__()
        self.time = nn.Conv1d(dim, dim, kernel, padding=kernel // 2, groups=dim)
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.time(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm(x))


class Denoiser(nn.Module):
    def __init__(self, frame=8, dim=22, depth=2):
        super().__init__()
        self.frame = frame
        self.inp = nn.Linear(frame, dim)
        self.mix = nn.ModuleList(Mixer(dim) for _ in range(depth))
        self.out = nn.Linear(dim, frame)

    def forward(self, wave):
        frames = wave.unflatten(1, (-1, self.frame))
        h = self.inp(frames)
        for m in self.mix:
            h = m(h)
        return wave + self.out(h).flatten(1)


def clean_and_noisy(step, batch, length=96):
    g = torch.Generator().manual_seed(31 * step + 7)
    t = torch.arange(length).float()
    f = 0.05 + 0.3 * torch.rand(batch, 2, 1, generator=g)
    clean = torch.sin(f * t + 6.28 * torch.rand(batch, 2, 1, generator=g)).mean(1)
    return clean, clean + 0.3 * torch.randn(batch, length, generator=g)
