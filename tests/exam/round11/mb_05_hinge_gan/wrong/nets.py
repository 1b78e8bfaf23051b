import torch.nn as nn
import torch.nn.functional as F


class GBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.norm = nn.GroupNorm(4, cin)
        self.conv = nn.Conv2d(cin, cout, 3, padding=1)

    def forward(self, x):
        return self.conv(F.interpolate(F.relu(self.norm(x)), scale_factor=2))


class Generator(nn.Module):
    def __init__(self, z=16, ch=32):
        super().__init__()
        self.ch = ch
        self.fc = nn.Linear(z, ch * 9)
        self.blocks = nn.ModuleList([GBlock(ch, ch // 2), GBlock(ch // 2, ch // 4)])
        self.rgb = nn.Conv2d(ch // 4, 1, 3, padding=1)

    def forward(self, z):
        x = self.fc(z).view(-1, self.ch, 3, 3)
        for b in self.blocks:
            x = b(x)
        return self.rgb(F.relu(x)).tanh()


class DBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 4, 2, 1)

    def forward(self, x):
        return F.leaky_relu(self.conv(x), 0.2)


class Discriminator(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.blocks = nn.ModuleList([DBlock(1, ch), DBlock(ch, 2 * ch)])
        self.out = nn.Linear(2 * ch * 9, 1)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.out(x.flatten(1))
