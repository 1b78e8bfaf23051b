"""A stochastic block graph with noisy node features."""
import torch


def block_graph(n=300, classes=4, p_in=0.06, p_out=0.015, feats=16, seed=21):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, classes, (n,), generator=g)
    same = label[:, None] == label[None, :]
    prob = torch.where(same, p_in, p_out)
    upper = torch.triu(torch.rand(n, n, generator=g) < prob, 1)
    adj = (upper | upper.T).float() + torch.eye(n)
    d = adj.sum(1).rsqrt()
    adj = d[:, None] * adj * d[None, :]
    centres = torch.randn(classes, feats, generator=g)
    x = 0.5 * centres[label] + torch.randn(n, feats, generator=g)
    perm = torch.randperm(n, generator=g)
    return {"x": x, "adj": adj, "y": label, "train": perm[:160], "valid": perm[160:220], "test": perm[220:]}
