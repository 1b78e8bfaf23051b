import torch
from torch.distributed.fsdp import fully_shard

from autoencoder import Grower, Pair


def seed_of(level):
    torch.manual_seed(900 + level)


def plant(lr):
    seed_of(0)
    net = Grower()
    fully_shard(net.core)
    fully_shard(net.read[0])
    fully_shard(net.write[0])
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    return net, opt


def grow(net, opt, lr):
    """Adds a level; the new parts are sharded at once and join the optimizer as a group of their own."""
    seed_of(len(net.levels) + 1)
    net.levels.append(Pair(net.ch))
    net.grow_io()
    fresh = [net.levels[-1], net.read[-1], net.write[-1]]
    for m in fresh:
        fully_shard(m)
    for g in opt.param_groups:
        g["lr"] *= 0.5
    opt.add_param_group({"params": [p for m in fresh for p in m.parameters()], "lr": lr})


def level_at(step, borders):
    return sum(step >= b for b in borders)
