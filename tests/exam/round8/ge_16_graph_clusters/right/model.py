import torch
import torch.nn as nn


class ClusterAutoencoder(nn.Module):
    def __init__(self, dim=24, width=48, code=6, clusters=5):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, width), nn.ELU(), nn.Linear(width, code))
        self.decoder = nn.Sequential(nn.Linear(code, width), nn.ELU(), nn.Linear(width, dim))
        self.centres = nn.Parameter(torch.zeros(clusters, code))

    def forward(self, x):
        """Returns the code, the reconstruction and the soft assignment (Student's t)."""
        z = self.encoder(x)
        q = 1 / (1 + (z.unsqueeze(1) - self.centres).square().sum(2))
        return z, self.decoder(z), q / q.sum(1, keepdim=True)
