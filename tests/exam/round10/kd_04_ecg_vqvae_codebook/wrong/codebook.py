import torch
import torch.nn as nn
import torch.nn.functional as F


class EMACodebook(nn.Module):
    """Vector quantiser whose codes follow exponential moving averages of the vectors assigned to them."""

    def __init__(self, n_codes, dim, decay=0.9, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        codes = torch.randn(n_codes, dim) * 0.3
        self.register_buffer("codes", codes)
        self.register_buffer("usage", torch.ones(n_codes))
        self.register_buffer("total", codes.clone())

    @torch.no_grad()
    def init_from(self, z):
        """Start the codes on encoder outputs picked at random."""
        flat = z.reshape(-1, z.shape[-1])
        self.codes.copy_(flat[torch.randperm(len(flat))[:self.codes.shape[0]]])
        self.total.copy_(self.codes)

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        dist2 = flat.square().sum(1, keepdim=True) - 2 * flat @ self.codes.t() + self.codes.square().sum(1)
        idx = dist2.argmin(1)
        q = F.embedding(idx, self.codes).view_as(z)
        if self.training:
            self.update(flat.detach(), idx)
        commit = F.mse_loss(z, q.detach())
        return z + (q - z).detach(), commit, idx.view(z.shape[:-1])

    @torch.no_grad()
    def update(self, flat, idx):
        onehot = F.one_hot(idx, self.codes.shape[0]).type_as(flat)
        counts = onehot.sum(0)
        sums = onehot.t() @ flat
        self.usage.mul_(self.decay).add_(counts, alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        n = self.usage.sum()
        smooth = (self.usage + self.eps) / (n + self.usage.numel() * self.eps) * n
        self.codes.copy_(self.total / smooth[:, None])
