"""Synthetic preference pairs: the better answer continues the prompt's arithmetic pattern."""
from dataclasses import dataclass

import torch

VOCAB, PROMPT, ANSWER = 32, 6, 8


@dataclass
class Pairs:
    chosen: torch.Tensor
    rejected: torch.Tensor
    mask_c: torch.Tensor
    mask_r: torch.Tensor

    def __len__(self):
        return len(self.chosen)

    def take(self, rows):
        return self.chosen[rows], self.rejected[rows], self.mask_c[rows], self.mask_r[rows]


def _mask(lengths):
    m = torch.zeros(len(lengths), PROMPT + ANSWER)
    for i, n in enumerate(lengths.tolist()):
        m[i, PROMPT:PROMPT + n] = 1
    return m


def make_pairs(n, seed=3):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCAB, (n, 1), generator=g)
    stride = torch.randint(1, 5, (n, 1), generator=g)
    good = (start + stride * torch.arange(PROMPT + ANSWER)) % VOCAB
    bad = good.clone()
    noise = torch.randint(VOCAB, (n, ANSWER), generator=g)
    flip = torch.rand(n, ANSWER, generator=g) < 0.6
    bad[:, PROMPT:] = torch.where(flip, noise, bad[:, PROMPT:])
    lengths = torch.randint(3, ANSWER + 1, (n,), generator=g)
    return Pairs(good, bad, _mask(lengths), _mask(lengths))


def epoch_order(n, epoch, seed=17):
    """The first pass goes through the set as it is stored, the later ones are shuffled."""
    if epoch == 0:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
