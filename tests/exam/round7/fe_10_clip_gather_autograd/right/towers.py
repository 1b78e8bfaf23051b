import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class ImageTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.proj = nn.Linear(16 * 16, dim)

    def forward(self, x):
        return self.proj(F.gelu(self.norm(self.conv(x))).flatten(1))


class TextTower(nn.Module):
    def __init__(self, vocab, dim):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, ids):
        return self.mix(self.embed(ids).mean(1))


class DualEncoder(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.image = ImageTower(dim)
        self.text = TextTower(vocab, dim)
        self.log_scale = nn.Parameter(torch.tensor([math.log(10.0)]))

    def forward(self, images, ids):
        a = F.normalize(self.image(images), dim=-1)
        b = F.normalize(self.text(ids), dim=-1)
        # the scale goes out with the embeddings, it may not be read outside forward while it is sharded
        return a, b, self.log_scale.clamp(max=math.log(50.0)).exp()


def build(seed):
    torch.manual_seed(seed)
    model = DualEncoder()
    fully_shard(model.image)
    fully_shard(model.text)
    return fully_shard(model)
