import torch


def make_sequences(n=88, length=20, vocab=40, seed=3):
    """Copy task: first half random, second half repeats it shifted by a per-sequence constant."""
    g = torch.Generator().manual_seed(seed)
    half = length // 2
    first = torch.randint(2, vocab, (n, half), generator=g)
    shift = torch.randint(0, 3, (n, 1), generator=g)
    return torch.cat([first, (first + shift) % vocab], dim=1)


def epoch_batches(data, epoch, micro, rank, world, seed=5):
    """Shuffled micro-batches of `micro` sequences over all ranks; each rank gets its slice."""
    g = torch.Generator().manual_seed(seed + 1000 * epoch)
    order = torch.randperm(len(data), generator=g)
    per = micro // world
    for i in range(0, len(order), micro):
        yield data[order[i : i + micro][rank * per : (rank + 1) * per]]
