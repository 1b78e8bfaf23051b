import torch

USERS, ITEMS, RATINGS = 48, 32, 640


def ratings(seed=19):
    g = torch.Generator().manual_seed(seed)
    u = torch.randint(0, USERS, (RATINGS,), generator=g)
    i = torch.randint(0, ITEMS, (RATINGS,), generator=g)
    a, b = torch.randn(USERS, 3, generator=g), torch.randn(ITEMS, 3, generator=g)
    return u, i, torch.tanh((a[u] * b[i]).sum(1)) + 0.1 * torch.randn(RATINGS, generator=g)


def batch(data, step, size, rank, world):
    ids = torch.randint(0, RATINGS, (size,), generator=torch.Generator().manual_seed(40_000 + step))
    ids = ids.view(world, -1)[rank]
    return tuple(t[ids] for t in data)
