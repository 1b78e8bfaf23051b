"""Random geometric graph: close points are linked."""
import torch

N = 160


def build_graph(seed=21):
    g = torch.Generator().manual_seed(seed)
    pos = torch.rand(N, 2, generator=g)
    near = torch.cdist(pos, pos) < 0.14
    edges = near.triu(1).nonzero()
    edges = edges[torch.randperm(len(edges), generator=g)]
    cut = len(edges) // 5
    held, kept = edges[:cut], edges[cut:]
    adj = torch.eye(N)
    adj[kept[:, 0], kept[:, 1]] = 1
    adj[kept[:, 1], kept[:, 0]] = 1
    feats = torch.cat([pos, torch.sin(6 * pos), torch.cos(9 * pos)], 1)
    return adj / adj.sum(1, keepdim=True), feats, kept, held


def draw_batch(edges, size):
    """`size` positive edges and as many random pairs, from the global generator (equal on all ranks)."""
    pos = edges[torch.randint(0, len(edges), (size,))]
    neg = torch.randint(0, N, (size, 2))
    pairs = torch.cat([pos, neg])
    label = torch.cat([torch.ones(size), torch.zeros(size)])
    mix = torch.randperm(2 * size)
    return pairs[mix], label[mix]
