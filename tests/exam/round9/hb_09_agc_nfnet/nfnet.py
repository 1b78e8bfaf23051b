import torch
import torch.nn as nn
import torch.nn.functional as F


class WSConv2d(nn.Conv2d):
    """Convolution with standardised weights and a gain for each output channel."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.gain = nn.Parameter(torch.ones(self.out_channels))

    def forward(self, x):
        w = self.weight.flatten(1)
        var, mean = torch.var_mean(w, dim=1, keepdim=True)
        w = (w - mean) * torch.rsqrt(var * w.shape[1] + 1e-4) * self.gain[:, None]
        return F.conv2d(x, w.view_as(self.weight), self.bias, self.stride, self.padding)


class NFBlock(nn.Module):
    def __init__(self, ch, alpha, beta):
        super().__init__()
        self.alpha, self.beta = alpha, beta
        self.conv1 = WSConv2d(ch, ch, 3, padding=1)
        self.conv2 = WSConv2d(ch, ch, 3, padding=1)
        self.skip_gain = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x):
        h = self.conv1(F.gelu(x / self.beta) * 1.7)
        h = self.conv2(F.gelu(h) * 1.7)
        return x + self.alpha * self.skip_gain * h


class NFNet(nn.Module):
    def __init__(self, n_classes=5, ch=14, depth=3, alpha=0.5):
        super().__init__()
        self.stem = WSConv2d(3, ch, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(NFBlock(ch, alpha, (1 + i * alpha**2) ** 0.5) for i in range(depth))
        self.fc = nn.Linear(ch, n_classes)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.fc(F.gelu(x).mean((2, 3)))
