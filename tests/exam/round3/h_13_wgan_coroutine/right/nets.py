import torch.nn as nn
from torch.distributed.fsdp import fully_shard


def net(i, o, d=24):
    m = nn.Sequential(nn.Linear(i, d), nn.LeakyReLU(0.2), nn.Linear(d, d), nn.LeakyReLU(0.2), nn.Linear(d, o))
    fully_shard(m[2])
    return fully_shard(m)
