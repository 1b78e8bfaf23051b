import torch

PAD, BOS, EOS = 0, 1, 2


def build_pairs(n, vocab, longest, seed):
    """Toy bitext: the target is the reversed source in the second half of the joint vocabulary."""
    g = torch.Generator().manual_seed(seed)
    half = (vocab - 3) // 2
    lexicon = torch.randperm(half, generator=g)
    pairs = []
    for _ in range(n):
        k = int(torch.randint(2, longest + 1, (1,), generator=g))
        s = torch.randint(0, half, (k,), generator=g)
        pairs.append(((s + 3).tolist(), (lexicon[s].flip(0) + 3 + half).tolist()))
    return pairs


def collate(pairs):
    width = max(len(s) for s, _ in pairs)
    src = torch.tensor([s + [PAD] * (width - len(s)) for s, _ in pairs])
    tgt = torch.tensor([[BOS] + t + [EOS] + [PAD] * (width - len(t)) for _, t in pairs])
    return src, tgt


def batches(pairs, size, seed):
    g = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(pairs), generator=g).tolist()
        for i in range(0, len(order) - size + 1, size):
            yield [pairs[j] for j in order[i : i + size]]
