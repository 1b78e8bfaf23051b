import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


class LocalLayer(nn.Module):
    """Trained by its own contrast of goodness (mean square activity) on positive and negative inputs."""

    def __init__(self, nin, nout, threshold=1.0):
        super().__init__()
        self.lin = nn.Linear(nin, nout)
        self.threshold = threshold

    def forward(self, x):
        x = x / (x.norm(dim=1, keepdim=True) / x.shape[1] ** 0.5 + 1e-4)
        return F.relu(self.lin(x))

    def contrast(self, pos, neg):
        gp, gn = pos.square().mean(1), neg.square().mean(1)
        return F.softplus(self.threshold - gp).mean() + F.softplus(gn - self.threshold).mean()


class Unit:
    """A layer, its optimizer and its part of the checkpoint."""

    def __init__(self, nin, nout, lr):
        self.layer = LocalLayer(nin, nout)
        fully_shard(self.layer, reshard_after_forward=True)
        self.opt = torch.optim.Adam(self.layer.parameters(), lr=lr)

    def learn(self, pos, neg):
        out = self.layer(torch.cat([pos, neg]))
        hp, hn = out.chunk(2)
        loss = self.layer.contrast(hp, hn)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return hp.detach(), hn.detach(), loss.detach()
