import torch


def block_graph(nodes=320, kinds=5, dim=24, hops=2, seed=101):
    """A stochastic block model; returns node features averaged over `hops` neighbourhoods, and the hidden blocks."""
    g = torch.Generator().manual_seed(seed)
    block = torch.randint(kinds, (nodes,), generator=g)
    same = block.unsqueeze(0) == block.unsqueeze(1)
    chance = torch.where(same, 0.08, 0.012)
    upper = torch.triu(torch.rand(nodes, nodes, generator=g) < chance, 1).float()
    adjacency = upper + upper.t() + torch.eye(nodes)
    scale = adjacency.sum(1).rsqrt()
    adjacency = scale.unsqueeze(1) * adjacency * scale
    x = torch.randn(kinds, dim, generator=g)[block] + 1.5 * torch.randn(nodes, dim, generator=g)
    for _ in range(hops):
        x = adjacency @ x
    return (x - x.mean(0)) / x.std(0), block
