import torch
import torch.nn as nn


class GRUBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.wx, self.wh = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        z, c = self.wx(self.norm(x)).chunk(2, -1)
        z = torch.sigmoid(z)
        h, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = (1 - z[:, t]) * h + z[:, t] * torch.tanh(c[:, t] + self.wh(h))
            out.append(h)
        return x + torch.stack(out, 1)


class RNNLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.dim)
        self.blocks = nn.ModuleList(GRUBlock(cfg.dim) for _ in range(cfg.layers))
        self.head = nn.Linear(cfg.dim, cfg.vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
