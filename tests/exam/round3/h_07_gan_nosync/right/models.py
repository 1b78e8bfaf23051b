import torch.nn as nn
from torch.distributed.fsdp import fully_shard


def mlp(*dims):
    layers = []
    for a, b in zip(dims[:-2], dims[1:-1]):
        layers.append(nn.Sequential(nn.Linear(a, b), nn.LeakyReLU(0.2)))
    layers.append(nn.Linear(dims[-2], dims[-1]))
    return nn.Sequential(*layers)


def shard(net):
    for layer in list(net)[:-1]:
        fully_shard(layer)
    return fully_shard(net)


def build(z_dim=8, x_dim=16):
    return shard(mlp(z_dim, 32, 32, x_dim)), shard(mlp(x_dim, 32, 32, 1))
