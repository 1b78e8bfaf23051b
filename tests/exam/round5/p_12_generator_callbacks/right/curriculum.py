"""Stateless data: the batch is a function of the step. Sequences get longer, the number of tokens in a step stays the same."""
import torch

VOCAB, TOKENS = 22, 192


def length(step):
    return 6 if step < 8 else 12 if step < 16 else 24


def tokens(step):
    t = length(step)
    rows = TOKENS // t
    g = torch.Generator().manual_seed(3 + 1009 * step)
    s = torch.randint(0, VOCAB, (rows, 2), generator=g)
    out = [s[:, 0], s[:, 1]]
    for _ in range(t - 1):
        out.append((out[-1] + out[-2]) % VOCAB)
    return torch.stack(out, 1)


def feed(start, rank, world):
    step = start
    while True:
        yield step, tokens(step)[rank::world]
        step += 1
