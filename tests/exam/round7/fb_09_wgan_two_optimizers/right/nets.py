import torch.nn as nn
import torch.nn.functional as F


class Generator(nn.Module):
    def __init__(self, zdim=8, ch=16):
        super().__init__()
        self.ch = ch
        self.fc = nn.Linear(zdim, ch * 4)
        self.up1 = nn.ConvTranspose2d(ch, ch, 4, 2, 1)
        self.up2 = nn.ConvTranspose2d(ch, 1, 4, 2, 1)

    def forward(self, z):
        h = F.relu(self.fc(z)).view(-1, self.ch, 2, 2)
        return self.up2(F.relu(self.up1(h))).tanh()


class Critic(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.c1 = nn.Conv2d(1, ch, 4, 2, 1)
        self.c2 = nn.Conv2d(ch, ch, 4, 2, 1)
        self.fc = nn.Linear(ch * 4, 1, bias=False)

    def forward(self, x):
        h = F.leaky_relu(self.c2(F.leaky_relu(self.c1(x), 0.2)), 0.2)
        return self.fc(h.flatten(1)).sum(1)
