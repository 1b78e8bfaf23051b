import torch.nn as nn

from .quantizer import EMAQuantizer


class VQVAE(nn.Module):
    def __init__(self, ch=16, dim=8, n_codes=24):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(1, ch, 4, 2, 1), nn.ReLU(), nn.Conv2d(ch, ch, 3, 1, 1), nn.ReLU(), nn.Conv2d(ch, dim, 1)
        )
        self.quant = EMAQuantizer(n_codes, dim)
        self.dec = nn.Sequential(
            nn.Conv2d(dim, ch, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(ch, ch, 4, 2, 1), nn.ReLU(), nn.Conv2d(ch, 1, 1)
        )

    def forward(self, x):
        q, commit, idx = self.quant(self.enc(x))
        return self.dec(q), commit, idx
