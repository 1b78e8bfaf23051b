"""Small stochastic world model: Gaussian latent, recurrent prior, decoder."""
import torch
import torch.nn as nn


class WorldModel(nn.Module):
    def __init__(self, dim=8, act=2, latent=8, hidden=32):
        super().__init__()
        self.latent = latent
        self.encode = nn.Sequential(nn.Linear(dim + latent, hidden), nn.ELU(), nn.Linear(hidden, 2 * latent))
        self.prior = nn.Sequential(nn.Linear(latent + act, hidden), nn.ELU(), nn.Linear(hidden, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent, hidden), nn.ELU(), nn.Linear(hidden, dim))

    def forward(self, obs, act, noise):
        """Negative evidence bound, mean over batch and time; ``noise`` is [batch, time, latent]."""
        z, loss = torch.zeros(len(obs), self.latent), 0.0
        for t in range(obs.shape[1]):
            u = act[:, t - 1] if t else torch.zeros_like(act[:, 0])
            pm, ps = self.prior(torch.cat([z, u], -1)).chunk(2, -1)
            ps = ps - 1.0
            qm, qs = self.encode(torch.cat([obs[:, t], pm], -1)).chunk(2, -1)
            qs = qs - 1.0
            z = qm + noise[:, t] * qs.exp()
            kl = ps - qs + ((2 * qs).exp() + (qm - pm).pow(2)) / (2 * (2 * ps).exp()) - 0.5
            rec = (self.decode(z) - obs[:, t]).pow(2)
            loss = loss + 4.0 * rec.mean() + 0.1 * kl.mean()
        return loss / obs.shape[1]
