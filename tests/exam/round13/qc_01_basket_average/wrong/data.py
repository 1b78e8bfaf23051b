"""Synthetic purchase sequences: every customer walks on a ring of categories with a preferred stride."""
import torch


def make_baskets(customers: int, items: int, slots: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(items, (customers, 1), generator=g)
    stride = torch.randint(1, 4, (customers, 1), generator=g)
    walk = (start + stride * torch.arange(slots + 1)) % items
    noise = torch.rand(walk.shape, generator=g) < 0.05
    walk = torch.where(noise, torch.randint(items, walk.shape, generator=g), walk)
    return walk[:, :-1], walk[:, -1]


def batch_of_step(n: int, step: int, batch: int, seed: int):
    per_epoch = n // batch
    epoch, k = divmod(step, per_epoch)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + 1000 * epoch))
    return order[k * batch:(k + 1) * batch]
