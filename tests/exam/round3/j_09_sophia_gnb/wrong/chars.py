import torch

VOCAB, CONTEXT = 12, 4


def corpus(n=6000, seed=9):
    """Second-order Markov text."""
    g = torch.Generator().manual_seed(seed)
    table = (3 * torch.randn(VOCAB, VOCAB, VOCAB, generator=g)).softmax(-1).cumsum(-1)
    u = torch.rand(n, generator=g)
    text = [0, 1]
    for k in range(n):
        text.append(int((table[text[-2], text[-1]] < u[k]).sum().clamp(max=VOCAB - 1)))
    return torch.tensor(text)


def windows(text, step, size, rank, world):
    g = torch.Generator().manual_seed(4000 + step)
    start = torch.randint(0, len(text) - CONTEXT - 1, (size,), generator=g)
    start = start.view(world, -1)[rank]
    span = start[:, None] + torch.arange(CONTEXT + 1)
    return text[span[:, :-1]], text[span[:, -1]]
