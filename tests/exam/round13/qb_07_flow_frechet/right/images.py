import torch

BASE = torch.randn(4, 36, generator=torch.Generator().manual_seed(1))


def real(seed, y):
    g = torch.Generator().manual_seed(seed)
    gain = 0.8 + 0.4 * torch.rand(len(y), 1, generator=g)
    return gain * BASE[y] + 0.15 * torch.randn(len(y), 36, generator=g)


def training_batch(step, n):
    g = torch.Generator().manual_seed(5000 + step)
    y = torch.randint(4, (n,), generator=g)
    return real(step, y), torch.randn(n, 36, generator=g), torch.rand(n, generator=g), y


def evaluation_set(n=128):
    y = torch.arange(4).repeat_interleave(n // 4)
    return real(777, y), torch.randn(n, 36, generator=torch.Generator().manual_seed(778)), y
