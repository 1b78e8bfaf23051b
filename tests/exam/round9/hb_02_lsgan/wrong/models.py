import torch.nn as nn
import torch.nn.functional as F


class Generator(nn.Module):
    def __init__(self, z_dim=16, ch=24):
        super().__init__()
        self.ch = ch
        self.fc = nn.Linear(z_dim, ch * 2 * 2)
        self.up1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.up2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, ch)
        self.norm2 = nn.GroupNorm(4, ch)
        self.rgb = nn.Conv2d(ch, 3, 1)

    def forward(self, z):
        x = self.fc(z).view(-1, self.ch, 2, 2)
        x = F.relu(self.norm1(self.up1(F.interpolate(x, scale_factor=2))))
        x = F.relu(self.norm2(self.up2(F.interpolate(x, scale_factor=2))))
        return self.rgb(x).tanh()


class Discriminator(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.conv1 = nn.Conv2d(3, ch, 4, 2, 1)
        self.conv2 = nn.Conv2d(ch, ch * 2, 4, 2, 1)
        self.fc = nn.Linear(ch * 2 * 4, 1)

    def forward(self, x):
        x = F.leaky_relu(self.conv1(x), 0.2)
        x = F.leaky_relu(self.conv2(x), 0.2)
        return self.fc(x.flatten(1))
