import torch.nn as nn


def generator(z=4, d=24, out=2):
    return nn.Sequential(nn.Linear(z, d), nn.LeakyReLU(0.2), nn.Linear(d, d), nn.LeakyReLU(0.2), nn.Linear(d, out))


def critic(d=24, inp=2):
    return nn.Sequential(nn.Linear(inp, d), nn.LeakyReLU(0.2), nn.Linear(d, d), nn.LeakyReLU(0.2), nn.Linear(d, 1))
