import torch
import torch.nn as nn
import torch.nn.functional as F


class GraphAttention(nn.Module):
    """Attention of a molecule's atoms over their bonds."""

    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(2 * dim, dim, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, h, bonds):
        x = self.norm1(h)
        att = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        att = att.masked_fill(~bonds, -1e9).softmax(-1)
        h = h + att @ self.v(x)
        return h + self.down(F.silu(self.up(self.norm2(h))))


class MoleculeNet(nn.Module):
    def __init__(self, atoms=6, dim=24, layers=2):
        super().__init__()
        self.embed = nn.Embedding(atoms, dim)
        self.layers = nn.ModuleList(GraphAttention(dim) for _ in range(layers))
        self.read = nn.Linear(dim, 1)

    def forward(self, kinds, bonds):
        h = self.embed(kinds)
        for layer in self.layers:
            h = layer(h, bonds)
        return self.read(h.mean(1))

    def split_parameters(self):
        matrices = [p for p in self.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        return matrices, [p for p in self.parameters() if id(p) not in chosen]
