import torch
from torch import nn
from torch.distributed.fsdp import fully_shard


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Regressor(nn.Module):
    def __init__(self, d_in=12, dim=24, depth=2, d_out=4):
        super().__init__()
        self.stem = nn.Linear(d_in, dim)
        self.blocks = nn.ModuleList(Residual(dim) for _ in range(depth))
        self.out = nn.Linear(dim, d_out)

    def forward(self, x):
        h = self.stem(x)
        for b in self.blocks:
            h = b(h)
        return self.out(h)


def build(mesh, seed=0):
    torch.manual_seed(seed)
    model = Regressor()
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
