import torch

VOCAB, LENGTH = 50, 16
_value = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))


def comparisons(step, n):
    """Two answers each; the annotators like the one with more of the valued tokens. Margins grade the preference."""
    g = torch.Generator().manual_seed(7_000 + step)
    a = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    b = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    gap = _value[a].sum(1) - _value[b].sum(1)
    swap = gap < 0
    chosen = torch.where(swap[:, None], b, a)
    rejected = torch.where(swap[:, None], a, b)
    return chosen, rejected, gap.abs()
