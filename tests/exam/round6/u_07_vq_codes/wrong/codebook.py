import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class EMACodebook(nn.Module):
    """Vector quantiser whose codes follow the running means of what is assigned to them."""

    def __init__(self, codes, dim, decay=0.8, dead_below=0.3, seed=17):
        super().__init__()
        self.decay, self.dead_below = decay, dead_below
        gen = torch.Generator().manual_seed(seed)
        self.register_buffer("codes", 2 * torch.randn(codes, dim, generator=gen))
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", self.codes.clone())
        self.register_buffer("revived", torch.tensor(0))

    def forward(self, z):
        index = torch.cdist(z, self.codes).argmin(dim=1)
        q = self.codes[index]
        commit = F.mse_loss(z, q)
        return z + (q - z).detach(), index, commit

    @torch.no_grad()
    def update(self, z, index, gen):
        hot = F.one_hot(index, self.codes.shape[0]).float()
        n, s = hot.sum(0), hot.T @ z
        dist.all_reduce(n)
        dist.all_reduce(s)
        self.count.mul_(self.decay).add_(n, alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(s, alpha=1 - self.decay)
        self._revive(z, gen)
        self.codes.copy_(self.total / self.count.clamp(min=1e-5)[:, None])

    def _revive(self, z, gen):
        """Codes that nothing chooses any more get a new place at a random vector of the batch."""
        dead = (self.count < self.dead_below).nonzero().flatten()
        if len(dead) == 0:
            return
        pick = torch.randint(0, z.shape[0], (len(dead),), generator=gen)
        self.total[dead] = z[pick]
        self.count[dead] = 1.0
        self.revived += len(dead)
