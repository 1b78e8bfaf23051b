import torch.nn as nn
from torch.distributed.fsdp import fully_shard


def build(frozen=False):
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
    if frozen:
        net.requires_grad_(False)
    for m in net:
        if isinstance(m, nn.Linear):
            fully_shard(m)
    return fully_shard(net, reshard_after_forward=True)
