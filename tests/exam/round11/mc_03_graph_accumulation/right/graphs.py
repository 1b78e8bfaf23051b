import torch


def make_graphs(count=320, nodes=10, feats=5, seed=1):
    """Random small graphs; the target mixes triangles, degrees and node types."""
    g = torch.Generator().manual_seed(seed)
    size = torch.randint(5, nodes + 1, (count,), generator=g)
    alive = (torch.arange(nodes)[None] < size[:, None]).float()
    up = torch.triu((torch.rand(count, nodes, nodes, generator=g) < 0.35).float(), diagonal=1)
    adj = (up + up.transpose(1, 2)) * alive[:, :, None] * alive[:, None, :]
    kind = torch.randint(feats, (count, nodes), generator=g)
    x = torch.nn.functional.one_hot(kind, feats).float() * alive[..., None]
    triangles = torch.diagonal(adj @ adj @ adj, dim1=1, dim2=2).sum(1) / 6
    hetero = (x[..., 0] * (adj @ x[..., 1:2]).squeeze(-1)).sum(1)
    y = 0.3 * triangles - 0.4 * hetero + 0.1 * adj.sum((1, 2))
    y = (y - y.mean()) / y.std()
    return x, adj, alive, y
