import torch
import torch.nn as nn
import torch.nn.functional as F


class SparseAutoencoder(nn.Module):
    """Overcomplete dictionary for normal machine behaviour; the anomaly score is the reconstruction error."""

    def __init__(self, dim=24, atoms=64, top_k=8):
        super().__init__()
        self.top_k = top_k
        self.shift = nn.Parameter(torch.zeros(dim))
        self.encoder = nn.Linear(dim, atoms)
        self.decoder = nn.Linear(atoms, dim, bias=False)   # weight [dim, atoms]: an atom is a column
        with torch.no_grad():
            self.decoder.weight.div_(self.decoder.weight.norm(dim=0, keepdim=True))
            self.encoder.weight.copy_(self.decoder.weight.T)
            self.encoder.bias.zero_()

    def forward(self, x):
        a = F.relu(self.encoder(x - self.shift))
        keep = a.topk(self.top_k, dim=-1)
        code = torch.zeros_like(a).scatter(-1, keep.indices, keep.values)
        return self.decoder(code) + self.shift, code
