import torch
import torch.distributed as dist
import torch.nn as nn


class EMAQuantizer(nn.Module):
    """Vector quantiser whose codebook is not trained by gradients: running counts and sums of the vectors assigned
    to every code, taken over the global batch. Codes that fall out of use are moved to vectors of the current batch."""

    def __init__(self, codes=24, dim=6, decay=0.9, min_count=0.4):
        super().__init__()
        self.decay, self.min_count = decay, min_count
        self.register_buffer("codebook", torch.randn(codes, dim))
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codebook.clone())
        self.register_buffer("restarts", torch.zeros((), dtype=torch.long))

    def forward(self, z):
        flat = z.detach().reshape(-1, z.shape[-1])
        idx = torch.cdist(flat, self.codebook).argmin(1)
        quant = self.codebook[idx].view_as(z)
        return z + (quant - z).detach(), (z - quant).square().mean(), idx

    @torch.no_grad()
    def update(self, z, idx):
        """z and idx of this rank, in the order of the global batch."""
        flat = z.reshape(-1, z.shape[-1])
        onehot = torch.nn.functional.one_hot(idx, len(self.codebook)).to(torch.float64)
        packed = torch.cat([onehot.sum(0)[:, None], onehot.T @ flat.double()], 1)
        dist.all_reduce(packed)
        self.counts.lerp_(packed[:, 0].float(), 1 - self.decay)
        self.sums.lerp_(packed[:, 1:].float(), 1 - self.decay)
        self._restart_dead(flat)
        n = self.counts.sum()
        smoothed = (self.counts + 1e-5) / (n + len(self.counts) * 1e-5) * n
        self.codebook.copy_(self.sums / smoothed[:, None])

    def _restart_dead(self, flat):
        dead = (self.counts < self.min_count).nonzero().flatten()
        everything = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(everything, flat.contiguous())
        if len(dead) == 0:
            return
        everything = torch.cat(everything)
        g = torch.Generator().manual_seed(1234 + int(self.restarts))
        pick = torch.randperm(len(everything), generator=g)[: len(dead)]
        self.counts[dead] = 1.0
        self.sums[dead] = everything[pick]
        self.restarts += len(dead)
