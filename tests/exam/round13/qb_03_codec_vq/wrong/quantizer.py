import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def gather_rows(x):
    """Rows of all ranks, in rank order."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class EmaCodebook(nn.Module):
    """Vector quantizer whose codes follow a moving average of the vectors assigned to them."""

    def __init__(self, codes, dim, decay=0.9, expire_below=0.4, expire_every=3):
        super().__init__()
        self.decay, self.expire_below, self.expire_every = decay, expire_below, expire_every
        embed = torch.randn(codes, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("embed_sum", embed.clone())
        self.register_buffer("usage", torch.ones(codes))
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def _update(self, flat, index):
        onehot = F.one_hot(index, len(self.embed)).to(flat.dtype)
        count, total = onehot.sum(0), onehot.T @ flat
        dist.all_reduce(count)
        dist.all_reduce(total)
        self.usage.lerp_(count, 1 - self.decay)
        self.embed_sum.lerp_(total, 1 - self.decay)
        self.embed.copy_(self.embed_sum / self.usage.clamp(min=1e-3).unsqueeze(1))
        self.updates += 1
        if self.updates % self.expire_every == 0:
            self._expire(flat)

    @torch.no_grad()
    def _expire(self, flat):
        dead = self.usage < self.expire_below
        if not dead.any():
            return
        pool = flat
        g = torch.Generator().manual_seed(int(self.updates))
        pick = pool[torch.randint(len(pool), (len(self.embed),), generator=g)]
        self.embed.copy_(torch.where(dead.unsqueeze(1), pick, self.embed))
        self.usage.masked_fill_(dead, 1.0)
        self.embed_sum.copy_(torch.where(dead.unsqueeze(1), pick, self.embed_sum))

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        index = torch.cdist(flat, self.embed).argmin(1)
        q = self.embed[index].view_as(z)
        if self.training:
            self._update(flat.detach(), index)
        commit = F.mse_loss(z, q)
        return z + (q - z).detach(), commit, index
