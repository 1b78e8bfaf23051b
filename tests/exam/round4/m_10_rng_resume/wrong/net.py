import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class MaskedAutoencoder(nn.Module):
    def __init__(self, d=16, width=32, p=0.3):
        super().__init__()
        self.mask_value = nn.Parameter(torch.zeros(d))
        self.p = p
        self.enc = nn.Sequential(nn.Linear(d, width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 8))
        self.dec = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, d))

    def forward(self, x):
        hide = torch.rand_like(x) < self.p
        z = self.enc(torch.where(hide, self.mask_value, x))
        return self.dec(z), hide


def build():
    torch.manual_seed(0)
    model = MaskedAutoencoder()
    fully_shard(model.enc)
    fully_shard(model.dec)
    return fully_shard(model)


def rows(n=640, d=16, rank_of_data=5):
    g = torch.Generator().manual_seed(77)
    return torch.randn(n, rank_of_data, generator=g) @ torch.randn(rank_of_data, d, generator=g) / 2
