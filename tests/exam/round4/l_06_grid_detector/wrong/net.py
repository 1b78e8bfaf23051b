import torch.nn as nn


def conv(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride=stride, padding=1), nn.GroupNorm(4, o), nn.SiLU())


class Detector(nn.Module):
    """One objectness logit and one box per cell of a 4 x 4 grid."""

    def __init__(self, ch=12):
        super().__init__()
        self.backbone = nn.ModuleList([conv(1, ch), conv(ch, ch, 2), conv(ch, 2 * ch, 2)])
        self.neck = conv(2 * ch, 2 * ch)
        self.cls = nn.Conv2d(2 * ch, 1, 1)
        self.box = nn.Conv2d(2 * ch, 4, 1)
        nn.init.constant_(self.cls.bias, -2.0)

    def forward(self, x):
        for layer in self.backbone:
            x = layer(x)
        x = self.neck(x)
        return self.cls(x).squeeze(1), self.box(x).permute(0, 2, 3, 1)
