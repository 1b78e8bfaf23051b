import torch

VOCAB, MASK, T = 20, 20, 12


class Corpus:
    """The whole corpus in memory; batches are blocks of rows, whose order is shuffled every epoch."""

    def __init__(self, rows=48, seed=7):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, VOCAB, (rows, 1), generator=g)
        self.ids = (start + 2 * torch.arange(T)) % VOCAB

    def block(self, step, batch, rank, world):
        per_epoch = len(self.ids) // batch
        order = torch.randperm(per_epoch, generator=torch.Generator().manual_seed(step // per_epoch))
        lo = order[step % per_epoch].item() * batch
        n = batch // world
        return self.ids[lo + rank * n : lo + (rank + 1) * n]


def collate(rows, step, batch, rank, world, p=0.25):
    g = torch.Generator().manual_seed(12345 + step)
    n = batch // world
    hide = (torch.rand(batch, T, generator=g) < p)[rank * n : (rank + 1) * n]
    labels = rows.clone()
    labels[~hide] = -100
    inputs = rows.clone()
    inputs[hide] = MASK
    return inputs, labels
