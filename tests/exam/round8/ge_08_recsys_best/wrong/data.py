import torch

SIZES = (24, 30, 6)


def interactions(n, seed):
    world = torch.Generator().manual_seed(60)
    taste = [torch.randn(s, 4, generator=world) for s in SIZES]
    g = torch.Generator().manual_seed(seed)
    fields = torch.stack([torch.randint(s, (n,), generator=g) for s in SIZES], 1)
    u, i, c = (t[fields[:, k]] for k, t in enumerate(taste))
    score = (u * i).sum(1) + (i * c).sum(1)
    return fields, (torch.rand(n, generator=g) < torch.sigmoid(1.2 * score)).float()
