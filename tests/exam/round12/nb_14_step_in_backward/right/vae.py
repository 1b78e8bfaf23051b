import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class VAE(nn.Module):
    def __init__(self, pixels=100, hidden=48, latent=6):
        super().__init__()
        self.enc1 = nn.Linear(pixels, hidden)
        self.enc2 = nn.Linear(hidden, 2 * latent)
        self.dec1 = nn.Linear(latent, hidden)
        self.dec2 = nn.Linear(hidden, pixels)

    def forward(self, x, noise):
        mu, logvar = self.enc2(torch.tanh(self.enc1(x))).chunk(2, dim=1)
        z = mu + noise * (0.5 * logvar).exp()
        y = self.dec2(torch.tanh(self.dec1(z)))
        kl = 0.5 * (mu.pow(2) + logvar.exp() - 1 - logvar).sum(1).mean()
        return y, kl


def build(seed=15):
    torch.manual_seed(seed)
    net = VAE()
    for child in net.children():
        fully_shard(child)
    return fully_shard(net)
