import torch
import torch.nn as nn
import torch.nn.functional as F


class CPC(nn.Module):
    """Strided convolutions, a GRU over the frames, and one predictor per horizon."""

    def __init__(self, channels=24, context=32, horizons=(1, 2)):
        super().__init__()
        self.horizons = horizons
        self.encoder = nn.Sequential(nn.Conv1d(1, channels, 8, stride=4), nn.ReLU(),
                                     nn.Conv1d(channels, channels, 4, stride=4), nn.ReLU())
        self.cell = nn.GRUCell(channels, context)
        self.predict = nn.ModuleList(nn.Linear(context, channels) for _ in horizons)

    def forward(self, wave, at):
        """wave: (n, samples); at: the frame from which the future is predicted."""
        z = self.encoder(wave[:, None]).transpose(1, 2)
        c = z.new_zeros(len(z), self.cell.hidden_size)
        for t in range(at + 1):
            c = self.cell(z[:, t], c)
        return [(F.normalize(p(c), dim=1), F.normalize(z[:, at + k], dim=1)) for k, p in zip(self.horizons, self.predict)]
