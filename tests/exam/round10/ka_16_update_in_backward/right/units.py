import torch
import torch.nn as nn
import torch.nn.functional as F

BOOKS, CODES, FRAMES, DIM = 3, 18, 14, 40


class UnitLM(nn.Module):
    """Language model over speech codec units: several codebooks a frame, each delayed by one frame more."""

    def __init__(self, depth=3):
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(CODES + 1, DIM) for _ in range(BOOKS))
        self.blocks = nn.ModuleList(nn.GRU(DIM, DIM, batch_first=True) for _ in range(depth))
        self.heads = nn.ModuleList(nn.Linear(DIM, CODES) for _ in range(BOOKS))

    def forward(self, units):
        x = sum(e(units[:, b]) for b, e in enumerate(self.emb))
        for block in self.blocks:
            x = x + block(x)[0]
        return torch.stack([h(x) for h in self.heads], 1)


def delay(units):
    """Shifts codebook b right by b frames; the gap is filled with the extra code."""
    width = units.size(-1) + BOOKS
    out = torch.full((len(units), BOOKS, width), CODES)
    for b in range(BOOKS):
        out[:, b, 1 + b : 1 + b + units.size(-1)] = units[:, b]
    return out


def loss_of(model, units):
    seq = delay(units)
    logits, target = model(seq[..., :-1]), seq[..., 1:]
    valid = target != CODES  # the same number in every row, so a mean of means is the mean
    return F.cross_entropy(logits[valid], target[valid])


def utterances(step, n):
    g = torch.Generator().manual_seed(808 + step)
    base = torch.randint(0, CODES, (n, 1), generator=g)
    drift = (torch.rand(n, FRAMES, generator=g) < 0.3).long().cumsum(1)
    coarse = (base + drift) % CODES
    return torch.stack([coarse, (2 * coarse) % CODES, (coarse + base) % CODES], 1)
