import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, d_in, d=32, depth=2, out=16):
        super().__init__()
        self.stem = nn.Linear(d_in, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.head = nn.Linear(d, out, bias=False)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return F.normalize(self.head(x), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, img_dim=48, txt_dim=24):
        super().__init__()
        self.image = Tower(img_dim)
        self.text = Tower(txt_dim)
        self.log_scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, img, txt):
        return self.image(img), self.text(txt), self.log_scale.clamp(max=4.6).exp()


def build(mesh):
    model = TwoTower()
    for tower in (model.image, model.text):
        for b in tower.blocks:
            fully_shard(b, mesh=mesh)
    return fully_shard(model, mesh=mesh)
