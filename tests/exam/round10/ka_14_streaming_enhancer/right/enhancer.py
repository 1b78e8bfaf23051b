import torch
import torch.nn as nn

from streams import BINS


class Enhancer(nn.Module):
    """Recurrent mask estimator, run chunk by chunk with its state carried over."""

    def __init__(self, dim=40, depth=2):
        super().__init__()
        self.inp = nn.Linear(BINS, dim)
        self.cells = nn.ModuleList(nn.LSTM(dim, dim, batch_first=True) for _ in range(depth))
        self.out = nn.Linear(dim, BINS)
        self.dim, self.depth = dim, depth

    def initial(self, n):
        return torch.zeros(n, self.depth, 2, self.dim)

    def forward(self, x, state):
        h = torch.tanh(self.inp(x))
        after = []
        for i, cell in enumerate(self.cells):
            y, (a, b) = cell(h, (state[None, :, i, 0].contiguous(), state[None, :, i, 1].contiguous()))
            after.append(torch.stack([a[0], b[0]], 1))
            h = h + y
        return self.out(h), torch.stack(after, 1)
