"""Synthetic utterances: every phone is a spectral template held for some frames; speakers differ in level."""
import torch

BINS, PHONES = 16, 10
_templates = torch.randn(PHONES + 1, BINS, generator=torch.Generator().manual_seed(3)) * 2


def utterance(index):
    g = torch.Generator().manual_seed(50_000 + index)
    n = int(torch.randint(3, 7, (1,), generator=g))
    phones = torch.randint(1, PHONES + 1, (n,), generator=g)
    hold = torch.randint(3, 6, (n,), generator=g)
    level = torch.randn(1, generator=g) * 3 - 6
    feats = _templates[phones.repeat_interleave(hold)]
    return feats + level + 0.4 * torch.randn(feats.shape, generator=g), phones


def batch(indices):
    items = [utterance(i) for i in indices]
    flen = torch.tensor([len(f) for f, _ in items])
    plen = torch.tensor([len(p) for _, p in items])
    feats = torch.nn.utils.rnn.pad_sequence([f for f, _ in items], batch_first=True)
    return feats, flen, torch.cat([p for _, p in items]), plen
