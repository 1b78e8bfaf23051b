import torch

VOCAB, WORDS = 50, 8


def _pad(rows):
    ids = torch.zeros(len(rows), WORDS, dtype=torch.long)
    for i, r in enumerate(rows):
        ids[i, : len(r)] = r
    return ids, ids > 0


def batch(step, n):
    """Queries of two or three words out of the passage which they ask for, one word replaced by a synonym."""
    g = torch.Generator().manual_seed(50_000 + step)
    queries, passages = [], []
    for _ in range(n):
        passage = torch.randperm(VOCAB - 1, generator=g)[: int(torch.randint(5, WORDS + 1, (1,), generator=g))] + 1
        query = passage[: int(torch.randint(2, 4, (1,), generator=g))].clone()
        query[0] = query[0] % (VOCAB - 1) + 1
        queries.append(query)
        passages.append(passage)
    return _pad(queries), _pad(passages)
