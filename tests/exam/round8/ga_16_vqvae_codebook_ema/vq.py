import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class EmaCodebook(nn.Module):
    """Vector quantiser whose codes are learned by moving averages over the global batch, not by gradient.
    The buffers are the same on all ranks. Codes that have died are put on encoder outputs drawn from all ranks."""

    def __init__(self, codes, dim, decay=0.8, floor=0.05):
        super().__init__()
        self.decay, self.floor = decay, floor
        self.register_buffer("codes", torch.randn(codes, dim) * 0.5)
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", self.codes.clone())
        self.register_buffer("revived", torch.zeros((), dtype=torch.long))

    def forward(self, z):
        flat = z.detach()
        idx = torch.cdist(flat.double(), self.codes.double()).argmin(-1)
        q = self.codes[idx]
        commit = (z - q).pow(2).mean()
        if self.training:
            self._last = (flat, idx)
        return z + (q - z).detach(), commit, idx

    @torch.no_grad()
    def update(self, gen):
        flat, idx = self._last
        hot = F.one_hot(idx, len(self.codes)).double()
        stats = torch.cat([hot.sum(0)[:, None], hot.t() @ flat.double()], 1)
        dist.all_reduce(stats)
        self.count.mul_(self.decay).add_(stats[:, 0].float(), alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(stats[:, 1:].float(), alpha=1 - self.decay)

        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, flat.contiguous())
        everything = torch.cat(parts)
        pick = everything[torch.randint(len(everything), (len(self.codes),), generator=gen)]
        dead = self.count < self.floor
        self.revived += dead.sum()
        self.total[dead] = pick[dead]
        self.count[dead] = 1.0
        self.codes.copy_(self.total / self.count[:, None])
