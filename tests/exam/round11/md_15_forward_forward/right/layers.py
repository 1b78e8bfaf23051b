import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class FFLayer(nn.Module):
    """One layer of the Forward-Forward algorithm (Hinton, 2022); its loss stays inside the layer."""

    def __init__(self, inputs, width, threshold=1.0, peer=0.03):
        super().__init__()
        self.lin = nn.Linear(inputs, width)
        self.threshold, self.peer = threshold, peer
        self.register_buffer("activity", torch.full((width,), 0.5))

    def forward(self, x):
        return F.relu(self.lin(F.normalize(x, dim=-1) * x.shape[-1] ** 0.5))

    def local_loss(self, h_pos, h_neg):
        g_pos, g_neg = h_pos.pow(2).mean(-1), h_neg.pow(2).mean(-1)
        loss = F.softplus(self.threshold - g_pos).mean() + F.softplus(g_neg - self.threshold).mean()
        # peer term: units that were more active than the average are pushed down. It is linear in the
        # activity of this batch, so the average over the ranks is the term of the global batch.
        excess = self.activity - self.activity.mean()
        return loss + self.peer * (excess * h_pos.mean(0)).sum()

    @torch.no_grad()
    def track(self, h_pos, decay=0.9):
        mean = h_pos.mean(0)
        dist.all_reduce(mean)
        self.activity.lerp_(mean / dist.get_world_size(), 1 - decay)


class FFNet:
    """Not a Module on purpose: nothing is ever differentiated through more than one layer."""

    def __init__(self, sizes):
        self.layers = [FFLayer(a, b) for a, b in zip(sizes[:-1], sizes[1:])]

    def __iter__(self):
        return iter(self.layers)

    @torch.no_grad()
    def goodness(self, x, skip_first=False):
        total = 0
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i or not skip_first:
                total = total + x.pow(2).mean(-1)
        return total
