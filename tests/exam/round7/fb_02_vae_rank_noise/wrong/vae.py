import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, dim, hidden, latent):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.mu = nn.Linear(hidden, latent)
        self.logvar = nn.Linear(hidden, latent)

    def forward(self, x):
        h = self.net(x)
        return self.mu(h), self.logvar(h).clamp(-8, 4)


class Decoder(nn.Module):
    def __init__(self, dim, hidden, latent):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(latent, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, dim)
        )

    def forward(self, z):
        return self.net(z)


class VAE(nn.Module):
    def __init__(self, dim=64, hidden=48, latent=8):
        super().__init__()
        self.encoder = Encoder(dim, hidden, latent)
        self.decoder = Decoder(dim, hidden, latent)

    def forward(self, x, generator):
        mu, logvar = self.encoder(x)
        eps = torch.randn(mu.shape, generator=generator)
        recon = self.decoder(mu + eps * (0.5 * logvar).exp())
        rec = F.mse_loss(recon, x, reduction="none").sum(1).mean()
        kl = (-0.5 * (1 + logvar - mu**2 - logvar.exp())).sum(1).mean()
        return rec, kl
