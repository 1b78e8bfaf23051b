"""Vector quantiser whose codebook is a buffer, learned by moving averages instead of gradients."""
import torch
import torch.distributed as dist
import torch.nn as nn


def gather_rows(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


class Quantizer(nn.Module):
    def __init__(self, codes=32, dim=8, decay=0.9, min_count=0.4, seed=17):
        super().__init__()
        self.decay, self.min_count, self.seed = decay, min_count, seed
        init = 0.1 * torch.randn(codes, dim, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("codebook", init)
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", init.clone())
        self.register_buffer("updates", torch.zeros((), dtype=torch.long))

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        index = torch.cdist(flat.detach(), self.codebook).argmin(dim=1)
        quantized = self.codebook[index].view_as(z)
        if self.training:
            self._learn(flat.detach(), index)
        commit = (z - quantized).pow(2).mean()
        return z + (quantized - z).detach(), commit, index

    @torch.no_grad()
    def _learn(self, flat, index):
        hits = torch.zeros_like(self.counts).index_add_(0, index, torch.ones(len(index)))
        total = torch.zeros_like(self.sums).index_add_(0, index, flat)
        dist.all_reduce(hits)
        dist.all_reduce(total)
        self.counts.mul_(self.decay).add_(hits, alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(total, alpha=1 - self.decay)
        self.updates += 1
        self._revive(flat)
        self.codebook.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])

    def _revive(self, flat):
        """Codes that are hardly used are moved onto random encoder outputs of the current batch."""
        pool = gather_rows(flat)
        dead = self.counts < self.min_count
        g = torch.Generator().manual_seed(self.seed * 100_003 + int(self.updates))
        pick = torch.randint(len(pool), (len(self.counts),), generator=g)
        self.sums[dead] = pool[pick[dead]]
        self.counts[dead] = 1.0
