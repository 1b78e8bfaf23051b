import torch

VOCAB, T = 36, 16


def rows(split, step, n):
    """Dyck-like text: counters go up and down between two marks, with noise"""
    g = torch.Generator().manual_seed({"train": 0, "valid": 10**6}[split] + step)
    phase, period = torch.randint(0, 60, (n, 1), generator=g), torch.randint(5, 9, (n, 1), generator=g)
    t = torch.arange(T + 1) + phase
    saw = (t % (2 * period) - period).abs()
    x = (saw + 9 * (period % 4)) % VOCAB
    return torch.where(torch.rand(x.shape, generator=g) < 0.03, torch.randint(0, VOCAB, x.shape, generator=g), x)
