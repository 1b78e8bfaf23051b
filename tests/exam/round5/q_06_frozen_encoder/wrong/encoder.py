import torch
import torch.nn as nn


class PretrainedEncoder(nn.Module):
    """Stands for an image encoder that was trained elsewhere; weights and BN statistics come from a file in real life."""

    def __init__(self, width=12, seed=77):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 2, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 2, 1)
        self.bn2 = nn.BatchNorm2d(width)
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g) * 0.2 + (1.0 if p.ndim == 1 else 0.0))
            for bn in (self.bn1, self.bn2):
                bn.running_mean.copy_(torch.randn(width, generator=g) * 0.5)
                bn.running_var.copy_(torch.rand(width, generator=g) * 2 + 0.3)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = torch.relu(self.bn2(self.conv2(x)))
        return x.flatten(2).transpose(1, 2)
