import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.n2(x))))


class TinyMAE(nn.Module):
    """Encodes the visible patches, predicts the pixels of the hidden ones."""

    def __init__(self, patch=4, n=16, d=24, keep=6):
        super().__init__()
        self.patch, self.keep = patch, keep
        self.embed = nn.Linear(patch * patch, d)
        self.pos = nn.Parameter(0.1 * torch.randn(1, n, d))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, d))
        self.enc = nn.ModuleList(Block(d) for _ in range(2))
        self.dec = Block(d)
        self.head = nn.Linear(d, patch * patch)

    def patches(self, x):
        p = self.patch
        return x.unfold(1, p, p).unfold(2, p, p).flatten(3).flatten(1, 2)

    def forward(self, x, order):
        target = self.patches(x)
        b, n, _ = target.shape
        tokens = self.embed(target) + self.pos
        d = tokens.shape[-1]
        idx = order.unsqueeze(-1).expand(-1, -1, d)
        visible = tokens.gather(1, idx[:, : self.keep])
        for blk in self.enc:
            visible = blk(visible)
        hidden = self.mask_token + self.pos.expand(b, -1, -1).gather(1, idx[:, self.keep :])
        out = self.head(self.dec(torch.cat([visible, hidden], 1)))[:, self.keep :]
        want = target.gather(1, order.unsqueeze(-1).expand(-1, -1, target.shape[-1]))[:, self.keep :]
        return (out - want).pow(2).mean()
