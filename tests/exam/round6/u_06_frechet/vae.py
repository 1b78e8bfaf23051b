import torch
import torch.nn as nn
import torch.nn.functional as F


class ClassVAE(nn.Module):
    def __init__(self, pixels=64, hidden=64, latent=6, classes=8):
        super().__init__()
        self.latent = latent
        self.label = nn.Embedding(classes, hidden)
        self.enc_in = nn.Linear(pixels, hidden)
        self.enc_out = nn.Linear(hidden, 2 * latent)
        self.dec_in = nn.Linear(latent, hidden)
        self.dec_mid = nn.Linear(hidden, hidden)
        self.dec_out = nn.Linear(hidden, pixels)

    def decode(self, z, y):
        h = F.silu(self.dec_in(z) + self.label(y))
        return self.dec_out(F.silu(self.dec_mid(h)))

    def forward(self, x, y, noise, sample=False):
        if sample:
            return self.decode(noise, y)
        mu, logvar = self.enc_out(F.silu(self.enc_in(x) + self.label(y))).chunk(2, dim=1)
        out = self.decode(mu + noise * (0.5 * logvar).exp(), y)
        rec = (out - x).pow(2).sum(1)
        kl = 0.5 * (mu.pow(2) + logvar.exp() - 1 - logvar).sum(1)
        return (rec + 0.3 * kl).mean()
