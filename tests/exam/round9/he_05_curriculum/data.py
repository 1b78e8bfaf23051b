import torch

VOCAB, MAXLEN = 20, 16


def make_sentences(n, seed=0):
    """Bags of signed tokens; the label says whether the weighted sum is positive. Long sentences are hard."""
    g = torch.Generator().manual_seed(seed)
    value = torch.linspace(-1, 1, VOCAB)
    length = torch.randint(3, MAXLEN + 1, (n,), generator=g)
    ids = torch.randint(0, VOCAB, (n, MAXLEN), generator=g)
    mask = torch.arange(MAXLEN)[None] < length[:, None]
    position = torch.linspace(1.0, -0.6, MAXLEN)
    label = ((value[ids] * position * mask).sum(1) > 0).long()
    return ids, mask, label, length.float()
