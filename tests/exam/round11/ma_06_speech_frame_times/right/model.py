import torch
import torch.nn as nn
import torch.nn.functional as F


class TimeEncoding(nn.Module):
    """Sine and cosine features of the frame's time in the recording (in frames of 10 ms)."""

    def __init__(self, dim):
        super().__init__()
        periods = 2.0 ** torch.arange(1, dim // 2 + 1)
        self.register_buffer("omega", 2 * torch.pi / periods)

    def forward(self, times):
        phase = times.float()[..., None] * self.omega.float()
        return torch.cat([phase.sin(), phase.cos()], -1)


class ConvBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        h = self.conv(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.out(F.gelu(h))


class FrameClassifier(nn.Module):
    def __init__(self, feats=12, dim=32, classes=4, blocks=2):
        super().__init__()
        self.time = TimeEncoding(dim)
        self.time_proj = nn.Linear(dim, dim)
        self.inp = nn.Linear(feats, dim)
        self.blocks = nn.ModuleList(ConvBlock(dim) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.cls = nn.Linear(dim, classes)

    def forward(self, feats, times):
        dtype = self.inp.weight.dtype
        x = self.inp(feats.to(dtype)) + self.time_proj(self.time(times).to(dtype))
        for block in self.blocks:
            x = block(x)
        return self.cls(self.norm(x)).float()
