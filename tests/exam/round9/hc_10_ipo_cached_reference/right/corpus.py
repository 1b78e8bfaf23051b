import torch

PAD = 0


def build(n=256, vocab=32, length=14, seed=15):
    """Sequences of different length; returns chosen, rejected and the masks of real target tokens."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(1, vocab, (n, 1), generator=g)
    seq = (start + 3 * torch.arange(length)) % (vocab - 1) + 1
    bad = torch.where(torch.rand(n, length, generator=g) < 0.4, torch.randint(1, vocab, (n, length), generator=g), seq)
    bad[:, :4] = seq[:, :4]
    keep = torch.arange(length) < torch.randint(6, length + 1, (n, 1), generator=g)
    chosen, rejected = seq.masked_fill(~keep, PAD), bad.masked_fill(~keep, PAD)
    return chosen, rejected, keep[:, 1:].float()


def batches(n, size, epochs, seed):
    for epoch in range(epochs):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
        yield from order.split(size)
