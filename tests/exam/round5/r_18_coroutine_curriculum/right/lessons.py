"""Sequences of rising length: copy the running maximum of a random token string."""
import torch

VOCAB, PAD, LONGEST = 16, 0, 16


def lesson(level, step, size):
    """A padded global batch [size, LONGEST]; lengths vary between 3 and a limit that grows with the level."""
    g = torch.Generator().manual_seed(level * 7919 + step)
    limit = min(LONGEST, 4 + 3 * level)
    lengths = torch.randint(3, limit + 1, (size,), generator=g)
    ids = torch.randint(1, VOCAB, (size, LONGEST), generator=g)
    inside = torch.arange(LONGEST)[None] < lengths[:, None]
    ids = ids.masked_fill(~inside, PAD)
    target = ids.cummax(1).values.masked_fill(~inside, -100)
    return ids, target
