"""Masked language modelling of toy sentences: adjective noun verb adjective noun, with agreement between the words."""
import torch

VOCAB, MASK, LENGTH = 36, 0, 10


def sentences(n, seed):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 5, (n, 2), generator=g)
    slots = torch.arange(5).repeat(2)
    word = 1 + slots * 7 + (kind.repeat_interleave(5, 1) + slots * 2) % 5
    noise = torch.randint(1, VOCAB, word.shape, generator=g)
    return torch.where(torch.rand(word.shape, generator=g) < 0.05, noise, word)


def mask_tokens(rows, seed, share=0.3):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.rand(rows.shape, generator=g) < share
    return rows.masked_fill(hidden, MASK), hidden
