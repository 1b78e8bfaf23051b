import torch


def long_streams(n_streams=8, length=400, vocab=30, seed=19):
    """Each stream counts with its own stride; the stride is only visible over a long context."""
    g = torch.Generator().manual_seed(seed)
    stride = torch.randint(1, 5, (n_streams, 1), generator=g)
    start = torch.randint(0, vocab, (n_streams, 1), generator=g)
    x = (start + stride * (torch.arange(length) // 2)) % vocab
    noise = torch.rand(n_streams, length, generator=g) < 0.1
    return torch.where(noise, torch.randint(0, vocab, x.shape, generator=g), x)
