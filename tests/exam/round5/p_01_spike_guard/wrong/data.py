"""Synthetic packed documents: arithmetic progressions mod 31, token 31 is EOS.
A few rows are garbage, as in a badly filtered crawl."""
import torch

VOCAB, EOS, CTX = 32, 31, 24


def _row(g, garbage):
    toks, pos, ids = [], [], []
    doc = 0
    while len(toks) < CTX + 1:
        n = int(torch.randint(5, 14, (1,), generator=g))
        start, stride = torch.randint(0, 31, (1,), generator=g), torch.randint(1, 4, (1,), generator=g)
        if garbage:
            d = torch.randint(0, 31, (n,), generator=g).tolist()
        else:
            d = ((start + stride * torch.arange(n)) % 31).tolist()
        d.append(EOS)
        toks += d
        pos += list(range(len(d)))
        ids += [doc] * len(d)
        doc += 1
    return toks[: CTX + 1], pos[: CTX + 1], ids[: CTX + 1]


def global_batch(step, rows, seed):
    g = torch.Generator().manual_seed(seed * 100003 + step)
    bad_step = step > 6 and step % 4 == 3
    out = [_row(g, garbage=bad_step and r < rows // 4) for r in range(rows)]
    t, p, i = (torch.tensor(x) for x in zip(*out))
    return t, p, i


def local_batch(step, rows, seed, rank, world):
    t, p, i = global_batch(step, rows, seed)
    n = rows // world
    sl = slice(rank * n, (rank + 1) * n)
    return t[sl], p[sl], i[sl]
