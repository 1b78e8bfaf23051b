from torch import nn
from torch.distributed.fsdp import fully_shard

from data import FRAGMENTS


def make_model(mesh, width=48):
    net = nn.Sequential(
        nn.Sequential(nn.Linear(FRAGMENTS, width), nn.GELU(), nn.LayerNorm(width)),
        nn.Sequential(nn.Linear(width, width), nn.GELU()),
        nn.Linear(width, 1),
    )
    fully_shard(net[0], mesh=mesh)
    fully_shard(net[1], mesh=mesh)
    return fully_shard(net, mesh=mesh)
