import torch
import torch.nn as nn
import torch.nn.functional as F


class Layer(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.fc = nn.Linear(inputs, outputs)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, x):
        return F.leaky_relu(self.norm(self.fc(x)), 0.2)


class Generator(nn.Module):
    def __init__(self, latent=8, classes=4, width=48):
        super().__init__()
        self.label = nn.Embedding(classes, latent)
        self.layers = nn.Sequential(Layer(2 * latent, width), Layer(width, width))
        self.out = nn.Linear(width, 3)

    def forward(self, z, c):
        return self.out(self.layers(torch.cat([z, self.label(c)], 1)))


class Critic(nn.Module):
    """Projection discriminator: the label enters by an inner product with the features."""

    def __init__(self, classes=4, width=48):
        super().__init__()
        self.layers = nn.Sequential(Layer(3, width), Layer(width, width))
        self.score = nn.Linear(width, 1)
        self.label = nn.Embedding(classes, width)

    def forward(self, x, c):
        h = self.layers(x)
        return self.score(h).squeeze(1) + (self.label(c) * h).sum(1) / h.shape[1] ** 0.5
