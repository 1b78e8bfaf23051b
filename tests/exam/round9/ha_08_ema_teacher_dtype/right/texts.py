import torch

VOCAB, CLASSES, LENGTH, MASK = 60, 6, 14, 0


def texts(seed, n):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (n,), generator=g)
    keyword = 1 + labels[:, None] * 6 + torch.randint(0, 6, (n, LENGTH), generator=g)
    filler = torch.randint(1, VOCAB, (n, LENGTH), generator=g)
    ids = torch.where(torch.rand(n, LENGTH, generator=g) < 0.3, keyword, filler)
    return ids, labels


def mask_words(ids, seed, p):
    g = torch.Generator().manual_seed(seed)
    return ids.masked_fill(torch.rand(ids.shape, generator=g) < p, MASK)
