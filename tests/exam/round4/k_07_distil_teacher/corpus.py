import torch

VOCAB = 36


def table(seed=42, order_skew=3.0):
    """A second-order Markov source: the next token depends on the two before it."""
    g = torch.Generator().manual_seed(seed)
    return torch.softmax(order_skew * torch.randn(6, VOCAB, VOCAB, generator=g), -1)


def sample(n, length, seed, probs=table()):
    g = torch.Generator().manual_seed(seed)
    out = torch.randint(VOCAB, (n, 2), generator=g)
    while out.shape[1] < length:
        p = probs[out[:, -2] % 6, out[:, -1]]
        out = torch.cat([out, torch.multinomial(p, 1, generator=g)], 1)
    return out
