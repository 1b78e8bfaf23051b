import torch


def utterances(n, seed, feats=10, phones=6):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(phones, feats, generator=torch.Generator().manual_seed(17))
    out = []
    for _ in range(n):
        length = int(torch.randint(4, 33, (1,), generator=g))
        y = torch.randint(phones, (length // 2 + 1,), generator=g).repeat_interleave(2)[:length]
        out.append((proto[y] + 0.7 * torch.randn(length, feats, generator=g), y))
    return out


def collate(items, feats=10):
    """Zero-padded; label -100 on the padding. An empty list gives one all-padding row."""
    if not items:
        return torch.zeros(1, 4, feats), torch.full((1, 4), -100)
    width = max(len(y) for _, y in items)
    x = torch.zeros(len(items), width, feats)
    lab = torch.full((len(items), width), -100)
    for i, (f, y) in enumerate(items):
        x[i, : len(y)] = f
        lab[i, : len(y)] = y
    return x, lab
