"""Made-up preference pairs: a prompt counts up; the chosen answer goes on counting, the rejected one does not."""
import torch

VOCAB, PAD = 32, 0


def pair(i, prompt=6, answer=8):
    g = torch.Generator().manual_seed(9000 + i)
    start = int(torch.randint(VOCAB, (1,), generator=g))
    seq = [1 + (start + k) % (VOCAB - 1) for k in range(prompt + answer)]
    n = int(torch.randint(3, answer + 1, (1,), generator=g))
    bad = torch.randint(1, VOCAB, (n,), generator=g).tolist()
    pad = [PAD] * (answer - n)
    chosen = seq[: prompt + n] + pad
    rejected = seq[:prompt] + bad + pad
    mask = [0] * prompt + [1] * n + pad
    return chosen, rejected, mask


def batch(step, size, rank, world):
    ids = range(step * size + rank * size // world, step * size + (rank + 1) * size // world)
    c, r, m = zip(*(pair(i % 160) for i in ids))
    return torch.tensor(c), torch.tensor(r), torch.tensor(m, dtype=torch.float32)
