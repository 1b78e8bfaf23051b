import torch
import torch.nn as nn


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.time = nn.Conv1d(dim, dim, 3, padding=1)
        self.mix = nn.Linear(dim, dim)
        self.gain = nn.Parameter(torch.ones(dim) * 0.5)

    def forward(self, h):
        r = self.time(self.norm(h).transpose(1, 2)).transpose(1, 2)
        return h + self.gain * self.mix(torch.relu(r))


class Denoiser(nn.Module):
    """Predicts a gain for every band and frame of a noisy spectrogram."""

    def __init__(self, depth, bands=16, dim=32):
        super().__init__()
        self.inp = nn.Linear(bands, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(depth))
        self.out = nn.Linear(dim, bands)

    def forward(self, noisy):
        h = self.inp(noisy)
        for layer in self.layers:
            h = layer(h)
        return noisy * torch.sigmoid(self.out(h))
