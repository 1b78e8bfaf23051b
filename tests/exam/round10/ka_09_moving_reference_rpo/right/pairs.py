import torch

VOCAB, WIDTH, PAD = 30, 20, 0


def draw(step, n):
    """Preference pairs of different lengths; a good answer counts upwards from the last prompt token."""
    g = torch.Generator().manual_seed(31_337 + step)
    chosen = torch.full((n, WIDTH), PAD)
    rejected = torch.full((n, WIDTH), PAD)
    spans = torch.zeros(n, 3, dtype=torch.long)
    for i in range(n):
        p, c, r = (int(torch.randint(lo, hi, (1,), generator=g)) for lo, hi in ((3, 7), (2, 13), (2, 13)))
        prompt = torch.randint(1, VOCAB, (p,), generator=g)
        chosen[i, :p] = rejected[i, :p] = prompt
        chosen[i, p : p + c] = (prompt[-1] + torch.arange(c)) % (VOCAB - 1) + 1
        rejected[i, p : p + r] = torch.randint(1, VOCAB, (r,), generator=g)
        spans[i] = torch.tensor([p, c, r])
    return chosen, rejected, spans


def answer_masks(spans):
    pos = torch.arange(WIDTH)[None]
    p, c, r = (s[:, None] for s in spans.unbind(1))
    return ((pos >= p) & (pos < p + c)).float(), ((pos >= p) & (pos < p + r)).float()
