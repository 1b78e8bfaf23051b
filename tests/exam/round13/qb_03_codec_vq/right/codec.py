import torch.nn.functional as F
from torch import nn

from quantizer import EmaCodebook


class Encoder(nn.Sequential):
    def __init__(self, width, dim):
        super().__init__(
            nn.Conv1d(1, width, 8, stride=4, padding=2), nn.ELU(),
            nn.Conv1d(width, width, 4, stride=2, padding=1), nn.ELU(),
            nn.Conv1d(width, dim, 3, padding=1),
        )


class Decoder(nn.Sequential):
    def __init__(self, width, dim):
        super().__init__(
            nn.Conv1d(dim, width, 3, padding=1), nn.ELU(),
            nn.ConvTranspose1d(width, width, 4, stride=2, padding=1), nn.ELU(),
            nn.ConvTranspose1d(width, 1, 8, stride=4, padding=2),
        )


class Codec(nn.Module):
    def __init__(self, width=20, dim=6, codes=24):
        super().__init__()
        self.encoder = Encoder(width, dim)
        self.quantizer = EmaCodebook(codes, dim)
        self.decoder = Decoder(width, dim)

    def forward(self, wave):
        z = self.encoder(wave.unsqueeze(1)).transpose(1, 2)
        q, commit, index = self.quantizer(z)
        out = self.decoder(q.transpose(1, 2)).squeeze(1)
        return F.mse_loss(out, wave) + 0.5 * (out.diff(dim=1) - wave.diff(dim=1)).abs().mean() + 0.25 * commit, index
