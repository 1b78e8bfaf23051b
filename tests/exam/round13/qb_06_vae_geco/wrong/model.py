import torch
from torch import nn


class FrameEncoder(nn.Module):
    def __init__(self, frame, width, latent):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(frame, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.mean = nn.Linear(width, latent)
        self.logvar = nn.Linear(width, latent)

    def forward(self, x):
        h = self.net(x)
        return self.mean(h), self.logvar(h).clamp(-6, 4)


class AudioVAE(nn.Module):
    def __init__(self, frame=24, width=24, latent=6):
        super().__init__()
        self.encoder = FrameEncoder(frame, width, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.SiLU(), nn.Linear(width, frame))

    def forward(self, x, eps):
        mean, logvar = self.encoder(x)
        out = self.decoder(mean + (0.5 * logvar).exp() * eps)
        rec = (out - x).square().sum(1).mean()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum(1).mean()
        return rec, kl
