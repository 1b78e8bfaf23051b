import torch


def clips(n, frames, mels, seed):
    g = torch.Generator().manual_seed(seed)
    phones = 2 * torch.randn(12, mels, generator=g)
    seq = torch.randint(12, (n, frames), generator=g)
    # speakers talk about neighbouring phones
    seq = (seq // 3 + torch.arange(n)[:, None] % 12) % 12
    return phones[seq] + 0.3 * torch.randn(n, frames, mels, generator=g)


def stream(x, batch, rank, world, start):
    step = start
    while True:
        lo = step * batch % len(x)
        part = batch // world
        yield step, x[lo + rank * part : lo + (rank + 1) * part]
        step += 1
