import torch
import torch.nn as nn


class ConvGRUCell(nn.Module):
    def __init__(self, cin, ch):
        super().__init__()
        self.gates = nn.Conv2d(cin + ch, 2 * ch, 3, padding=1)
        self.cand = nn.Conv2d(cin + ch, ch, 3, padding=1)

    def forward(self, x, h):
        r, z = self.gates(torch.cat([x, h], 1)).sigmoid().chunk(2, 1)
        c = self.cand(torch.cat([x, r * h], 1)).tanh()
        return (1 - z) * h + z * c


class Predictor(nn.Module):
    def __init__(self, ch=12, layers=2, side=10):
        super().__init__()
        self.ch, self.side = ch, side
        self.cells = nn.ModuleList([ConvGRUCell(1 if i == 0 else ch, ch) for i in range(layers)])
        self.out = nn.Conv2d(ch, 1, 1)

    def empty(self, n):
        return torch.zeros(len(self.cells), n, self.ch, self.side, self.side)

    def forward(self, frames, begins, hidden):
        """frames [T, n, 1, S, S]; predicts frame t+1 from the frames up to t"""
        h = list(hidden)
        predictions = []
        for x, new in zip(frames, begins):
            keep = (~new).float()[:, None, None, None]
            inp = x
            for i, cell in enumerate(self.cells):
                h[i] = cell(inp, h[i] * keep)
                inp = h[i]
            predictions.append(x + self.out(inp))
        return torch.stack(predictions), torch.stack(h)
