import torch.nn as nn


class Shared(nn.Module):
    def __init__(self, inp=10, dim=32):
        super().__init__()
        self.body = nn.ModuleList(
            [nn.Sequential(nn.Linear(inp, dim), nn.Tanh()), nn.Sequential(nn.Linear(dim, dim), nn.Tanh())]
        )
        self.heads = nn.ModuleDict({"speed": nn.Linear(dim, 1), "load": nn.Linear(dim, 1), "state": nn.Linear(dim, 4)})

    def forward(self, x, task):
        for layer in self.body:
            x = layer(x)
        return self.heads[task](x)
