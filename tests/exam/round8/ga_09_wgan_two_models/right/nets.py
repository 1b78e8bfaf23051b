import torch.nn as nn
from torch.distributed.fsdp import fully_shard


def mlp(sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers[:-1])


def sharded_mlp(sizes):
    net = mlp(sizes)
    for m in net:
        if isinstance(m, nn.Linear):
            fully_shard(m)
    return fully_shard(net)
