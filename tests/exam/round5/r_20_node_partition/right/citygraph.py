"""A grid of places with a smooth hidden field; the target of a node is the mean field of its neighbourhood."""
import torch

SIDE = 12
NODES = SIDE * SIDE


def build(seed=51):
    g = torch.Generator().manual_seed(seed)
    place = torch.arange(NODES)
    r, c = place // SIDE, place % SIDE
    near = ((r[:, None] - r[None]).abs() + (c[:, None] - c[None]).abs()) == 1
    adj = near.float() + torch.eye(NODES)
    adj = adj / adj.sum(1, keepdim=True)
    feats = torch.randn(NODES, 5, generator=g)
    field = torch.sin(feats[:, 0] * 2) + feats[:, 1] * feats[:, 2]
    return adj, feats, adj @ field


def owner_of(world, seed=52):
    """Which rank owns a node: uneven on purpose, as a partitioner would give."""
    u = torch.rand(NODES, generator=torch.Generator().manual_seed(seed))
    return (u.sqrt() * world).long().clamp_max(world - 1)
