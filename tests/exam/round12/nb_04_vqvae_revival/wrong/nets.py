import torch
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

from vq import Quantizer


class VQVAE(nn.Module):
    def __init__(self, width=32, dim=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, width, 4, stride=4), nn.ReLU(), nn.Conv2d(width, dim, 1))
        self.quantizer = Quantizer(dim=dim)
        self.decoder = nn.Sequential(nn.Conv2d(dim, width, 1), nn.ReLU(), nn.ConvTranspose2d(width, 1, 4, stride=4))

    def forward(self, x):
        z = self.encoder(x).permute(0, 2, 3, 1)
        q, commit, index = self.quantizer(z)
        return self.decoder(q.permute(0, 3, 1, 2)), commit, index


def build():
    torch.manual_seed(2)
    net = VQVAE()
    fully_shard(net.encoder)
    fully_shard(net.decoder)
    return fully_shard(net)
