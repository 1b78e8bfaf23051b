import torch

VOCAB = 32


def sequences(n, length, stride, seed):
    """Arithmetic progressions modulo the vocabulary, with a little noise."""
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCAB, (n, 1), generator=g)
    ids = (start + stride * torch.arange(length)) % VOCAB
    noise = torch.rand(n, length, generator=g) < 0.03
    return torch.where(noise, torch.randint(0, VOCAB, (n, length), generator=g), ids)
