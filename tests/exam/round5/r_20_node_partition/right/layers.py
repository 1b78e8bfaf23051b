import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard


class Exchange(torch.autograd.Function):
    """Every rank gives the rows of its own nodes (zeros elsewhere) and gets the rows of all; backward returns to a rank what
    all ranks want of its rows."""

    @staticmethod
    def forward(ctx, rows):
        out = rows.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class PartConv(nn.Module):
    """Transforms only the rank's own nodes, then exchanges and aggregates for them."""

    def __init__(self, i, o):
        super().__init__()
        self.own, self.send = nn.Linear(i, o), nn.Linear(i, o, bias=False)

    def forward(self, h, mine, adj):
        sent = torch.zeros(adj.shape[0], self.send.out_features).index_copy(0, mine, self.send(h))
        return self.own(h) + adj[mine] @ Exchange.apply(sent)


class PartGNN(nn.Module):
    def __init__(self, feats=5, d=32):
        super().__init__()
        self.convs = nn.ModuleList([PartConv(feats, d), PartConv(d, d)])
        self.read = nn.Linear(d, 1)

    def forward(self, x, mine, adj):
        h = x[mine]
        for conv in self.convs:
            h = conv(h, mine, adj).tanh()
        return self.read(h).squeeze(1)


def sharded_gnn():
    torch.manual_seed(0)
    m = PartGNN()
    for conv in m.convs:
        fully_shard(conv)
    return fully_shard(m)
