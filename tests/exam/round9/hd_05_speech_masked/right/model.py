import torch
import torch.nn as nn


class MaskedSpeechEncoder(nn.Module):
    """Reconstructs masked spans of a spectrogram."""

    def __init__(self, bins=20, dim=32, layers=2):
        super().__init__()
        self.inp = nn.Linear(bins, dim)
        self.mask_token = nn.Parameter(torch.zeros(dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(layers))
        self.out = nn.Linear(dim, bins)

    def forward(self, spec, mask):
        h = torch.where(mask[..., None], self.mask_token, self.inp(spec))
        for layer in self.layers:
            h = layer(h)
        return self.out(h)
