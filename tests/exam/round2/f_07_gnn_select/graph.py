"""A stochastic block graph with three classes and noisy node features."""

import torch


def make_graph(n=240, seed=21):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 3, (n,), generator=g)
    same = label[:, None] == label[None, :]
    prob = torch.where(same, torch.tensor(0.06), torch.tensor(0.015))
    adj = (torch.rand(n, n, generator=g) < prob).float().triu(1)
    adj = adj + adj.T + torch.eye(n)
    deg = adj.sum(1)
    norm = adj / (deg[:, None] * deg[None, :]).sqrt()
    feat = torch.nn.functional.one_hot(label, 3).float() @ torch.randn(3, 8, generator=g)
    feat = feat + 2.5 * torch.randn(n, 8, generator=g)
    perm = torch.randperm(n, generator=g)
    return norm, feat, label, perm[:64], perm[64:128]
