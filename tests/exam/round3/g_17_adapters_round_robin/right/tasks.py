import torch

from backbone import T, VOCAB

STRIDE = {"plus": 1, "skip": 4, "back": VOCAB - 3}
ORDER = ["plus", "skip", "plus", "back"]  # "plus" gets half of the steps


def task_of(step):
    return ORDER[step % len(ORDER)]


def rows(task, count, n):
    g = torch.Generator().manual_seed(1000 * STRIDE[task] + count)
    x = (torch.randint(0, VOCAB, (n, 1), generator=g) + STRIDE[task] * torch.arange(T + 1)) % VOCAB
    return torch.where(torch.rand(x.shape, generator=g) < 0.03, torch.randint(0, VOCAB, x.shape, generator=g), x)
