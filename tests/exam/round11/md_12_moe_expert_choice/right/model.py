import torch
import torch.nn as nn
import torch.nn.functional as F

from collective import gather_rows, sum_over_ranks


class ExpertBank(nn.Module):
    def __init__(self, experts, dim, hidden):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, dim, hidden) * dim ** -0.5)
        self.w2 = nn.Parameter(torch.randn(experts, hidden, dim) * hidden ** -0.5)

    def forward(self, x, gate):
        """x: tokens x dim, gate: tokens x experts, zero where the expert did not pick the token."""
        h = F.gelu(torch.einsum("td,edh->teh", x, self.w1))
        return (torch.einsum("teh,ehd->ted", h, self.w2) * gate[..., None]).sum(1)


class ExpertChoice(nn.Module):
    """Every expert picks the best `capacity` tokens of the global batch, so the routers of all ranks
    look at the scores of all tokens."""

    def __init__(self, dim, experts=4, fraction=0.5):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.bank = ExpertBank(experts, dim, 2 * dim)
        self.fraction = fraction

    def forward(self, x):
        shape = x.shape
        x = x.flatten(0, -2)
        logits = self.router(x)
        probs = logits.softmax(-1)
        with torch.no_grad():
            everyone = gather_rows(probs)
            capacity = int(len(everyone) * self.fraction)
            threshold = everyone.topk(capacity, dim=0).values[-1]
        gate = probs * (probs >= threshold)
        # importance: squared coefficient of variation of the summed probabilities over the experts
        importance = sum_over_ranks(probs.sum(0))
        cv2 = importance.var(unbiased=False) / importance.mean() ** 2
        z = logits.logsumexp(-1).pow(2).mean()
        return self.bank(x, gate).view(shape), cv2, z


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.moe = ExpertChoice(dim)

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v))
        y, cv2, z = self.moe(self.n2(x))
        return x + y, cv2, z


class PatchClassifier(nn.Module):
    """Classifies sets of patches, with a mixture-of-experts encoder and a mean-pooled head."""

    def __init__(self, patch=8, dim=24, layers=2, classes=5):
        super().__init__()
        self.embed = nn.Linear(patch, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        h, cv2s, zs = self.embed(x), [], []
        for block in self.blocks:
            h, cv2, z = block(h)
            cv2s.append(cv2)
            zs.append(z)
        return self.head(h.mean(1)), torch.stack(cv2s).mean(), torch.stack(zs).mean()
