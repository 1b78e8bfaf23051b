import torch.nn as nn

from quantizer import EMAQuantizer


class Mlp(nn.Module):
    def __init__(self, a, h, b):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(a, h), nn.GELU(), nn.Linear(h, b))

    def forward(self, x):
        return self.net(x)


class FrameVQ(nn.Module):
    """Codes single spectrogram frames."""

    def __init__(self, mels=20, dim=8):
        super().__init__()
        self.enc = Mlp(mels, 40, dim)
        self.vq = EMAQuantizer(dim=dim)
        self.dec = Mlp(dim, 40, mels)

    def forward(self, x):
        q, commit, ids = self.vq(self.enc(x))
        return self.dec(q), commit, ids
