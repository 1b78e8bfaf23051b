import torch
import torch.nn as nn
import torch.nn.functional as F


def make_graph(n=240, n_class=4, d=16, seed=8):
    """A noisy stochastic block model with weak node features."""
    g = torch.Generator().manual_seed(seed)
    label = torch.arange(n) * n_class // n
    same = label[:, None] == label[None, :]
    adj = (torch.rand(n, n, generator=g) < torch.where(same, 0.03, 0.012)).float()
    adj = ((adj + adj.T + torch.eye(n)) > 0).float()
    norm = adj.sum(1).rsqrt()
    adj = norm[:, None] * adj * norm[None, :]
    # nodes that were added to the graph later have noisier features
    noise = torch.linspace(0.3, 2.5, n)[:, None]
    x = 0.7 * torch.randn(n_class, d, generator=g)[label] + noise * torch.randn(n, d, generator=g)
    order = torch.randperm(n, generator=g)
    return adj, x, label, {"train": order[:64].sort().values, "valid": order[64:112].sort().values,
                             "test": order[112:].sort().values}


class GCN(nn.Module):
    def __init__(self, d=16, width=64, n_class=4):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(d, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, n_class)

    def forward(self, adj, x):
        for layer in self.layers:
            x = F.relu(adj @ layer(x))
        return self.head(x)
