import torch
import torch.nn as nn


class EnergyNet(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.convs = nn.ModuleList([nn.Sequential(nn.Conv2d(1, ch, 3, 1, 1), nn.SiLU()),
                                    nn.Sequential(nn.Conv2d(ch, 2 * ch, 4, 2, 1), nn.SiLU()),
                                    nn.Sequential(nn.Conv2d(2 * ch, 2 * ch, 4, 2, 1), nn.SiLU())])
        self.out = nn.Linear(2 * ch * 4, 1)

    def forward(self, x):
        for conv in self.convs:
            x = conv(x)
        return self.out(x.flatten(1)).squeeze(1)
