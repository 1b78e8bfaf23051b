import torch
import torch.nn as nn
import torch.nn.functional as F


class GraphConv(nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.own = nn.Linear(dim_in, dim_out)
        self.others = nn.Linear(dim_in, dim_out, bias=False)

    def forward(self, x, adj):
        degree = adj.sum(-1, keepdim=True).clamp(min=1)
        return F.gelu(self.own(x) + self.others(adj @ x / degree))


class GraphEncoder(nn.Module):
    def __init__(self, features, dim=24, out=16):
        super().__init__()
        self.convs = nn.ModuleList([GraphConv(features, dim), GraphConv(dim, dim)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, out)

    def forward(self, x, adj):
        for conv in self.convs:
            x = conv(x, adj)
        return F.normalize(self.head(self.norm(x.mean(1))), dim=-1)
