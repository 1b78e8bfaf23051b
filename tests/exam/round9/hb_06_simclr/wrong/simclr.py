import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from gather import gather


class Encoder(nn.Module):
    def __init__(self, ch=16, dim=16):
        super().__init__()
        self.conv1 = nn.Conv2d(3, ch, 3, 2, 1)
        self.norm1 = nn.GroupNorm(4, ch)
        self.conv2 = nn.Conv2d(ch, 2 * ch, 3, 2, 1)
        self.norm2 = nn.GroupNorm(4, 2 * ch)
        self.proj = nn.Sequential(nn.Linear(2 * ch, 2 * ch), nn.ReLU(), nn.Linear(2 * ch, dim))

    def features(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(x))).mean((2, 3))

    def forward(self, x):
        return F.normalize(self.proj(self.features(x)), dim=-1)


def info_nce(za, zb, temperature):
    """Symmetric InfoNCE: the local views against the views of all ranks."""
    all_a, all_b = gather(za), gather(zb)
    n = za.shape[0]
    target = torch.arange(n)
    ab = za @ all_b.t() / temperature
    ba = zb @ all_a.t() / temperature
    return 0.5 * (F.cross_entropy(ab, target) + F.cross_entropy(ba, target))


def augment(x, gen):
    """Random shift, flip and colour gain for each image of the batch."""
    n = x.shape[0]
    shift = torch.randint(-2, 3, (n, 2), generator=gen).tolist()
    flip = torch.rand(n, generator=gen) < 0.5
    gain = 1 + 0.3 * torch.randn(n, 3, 1, 1, generator=gen)
    x = torch.stack([torch.roll(im, s, dims=(1, 2)) for im, s in zip(x, shift)])
    x = torch.where(flip.view(-1, 1, 1, 1), x.flip(3), x)
    return x * gain + 0.05 * torch.randn(x.shape, generator=gen)
