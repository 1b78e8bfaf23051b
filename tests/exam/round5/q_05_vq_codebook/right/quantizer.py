import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class EMAQuantizer(nn.Module):
    """VQ with codebook learned by exponential moving averages (no gradient)."""

    def __init__(self, codes=16, dim=8, decay=0.8, eps=1e-3):
        super().__init__()
        self.decay, self.eps = decay, eps
        book = torch.randn(codes, dim)
        self.register_buffer("codebook", book)
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_sum", book.clone())

    @torch.no_grad()
    def _update(self, flat, ids):
        onehot = F.one_hot(ids, len(self.codebook)).to(flat.dtype)
        counts = onehot.sum(0)
        sums = onehot.t() @ flat
        dist.all_reduce(counts)
        dist.all_reduce(sums)
        self.cluster_size.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.embed_sum.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        n = self.cluster_size.sum()
        size = (self.cluster_size + self.eps) / (n + len(counts) * self.eps) * n
        self.codebook.copy_(self.embed_sum / size[:, None])

    def forward(self, z):
        flat = z.reshape(-1, z.size(-1))
        ids = torch.cdist(flat.detach(), self.codebook).argmin(1)
        q = self.codebook[ids].view_as(z)
        if self.training:
            self._update(flat.detach(), ids)
        commit = (z - q).square().mean()
        return z + (q - z).detach(), commit, ids
