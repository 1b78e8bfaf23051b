import torch


class CommunityGraph:
    """Random graph with communities. A node's class depends on its own and its neighbours' features."""

    def __init__(self, nodes=320, classes=6, features=16, degree=6, seed=5):
        g = torch.Generator().manual_seed(seed)
        group = torch.randint(0, classes, (nodes,), generator=g)
        same = (group[:, None] == group[None, :]).float() * 8 + 1
        self.neighbours = torch.multinomial(same, degree, generator=g)
        centre = torch.randn(classes, features, generator=g)
        self.x = centre[group] * 0.7 + torch.randn(nodes, features, generator=g)
        self.y = group
        order = torch.randperm(nodes, generator=g)
        self.train_nodes, self.test_nodes = order[:192], order[192:]
