import torch.nn as nn


class Generator(nn.Module):
    def __init__(self, z=16, ch=16):
        super().__init__()
        self.ch = ch
        self.fc = nn.Linear(z, 4 * ch * 9)
        self.up = nn.Sequential(nn.ConvTranspose2d(4 * ch, 2 * ch, 4, 2, 1), nn.GroupNorm(4, 2 * ch), nn.ReLU())
        self.out = nn.Sequential(nn.ConvTranspose2d(2 * ch, ch, 4, 2, 1), nn.ReLU(), nn.Conv2d(ch, 1, 3, padding=1), nn.Tanh())

    def forward(self, z):
        return self.out(self.up(self.fc(z).view(len(z), 4 * self.ch, 3, 3)))


class Discriminator(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, ch, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(ch, 2 * ch, 4, 2, 1), nn.LeakyReLU(0.2))
        self.fc = nn.Linear(2 * ch * 9, 1)

    def forward(self, x):
        return self.fc(self.down(x).flatten(1))[:, 0]
