import torch
import torch.nn as nn


class FrameLayer(nn.Module):
    def __init__(self, d, frames):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.time = nn.Linear(frames, frames)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        x = x + self.time(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ff(self.n2(x))


class SpeechEncoder(nn.Module):
    """Strided front end, a stack of layers, a projection to the target space."""

    def __init__(self, bins=16, d=32, depth=2, frames=12, out=24):
        super().__init__()
        self.front = nn.Conv1d(bins, d, 4, stride=2, padding=1)
        self.mask_token = nn.Parameter(torch.randn(d) * 0.1)
        self.layers = nn.ModuleList(FrameLayer(d, frames) for _ in range(depth))
        self.proj = nn.Linear(d, out, bias=False)

    def forward(self, mel, mask=None):
        x = torch.relu(self.front(mel.transpose(1, 2))).transpose(1, 2)
        if mask is not None:
            x = torch.where(mask[..., None], self.mask_token, x)
        for layer in self.layers:
            x = layer(x)
        return self.proj(x)
