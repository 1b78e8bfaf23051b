import torch

VOCAB, TAGS, LONG, EXPERTS = 20, 5, 12, 4


def sentences(n=800, seed=15):
    """Padded sentences of very different lengths; a tag depends on the word and the word before."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (n, LONG), generator=g)
    length = torch.randint(2, LONG + 1, (n, 1), generator=g)
    rule = torch.randint(0, TAGS, (VOCAB, VOCAB), generator=g) % torch.randint(2, TAGS + 1, (VOCAB, 1), generator=g)
    prev = torch.cat([torch.zeros(n, 1, dtype=torch.long), ids[:, :-1]], 1)
    tag = rule[prev % 5, ids]
    pad = torch.arange(LONG) >= length
    return ids.masked_fill(pad, 0), tag.masked_fill(pad, -100)


def part_of(step, size, rank, world, ids, tag):
    g = torch.Generator().manual_seed(8_000 + step)
    idx = torch.randperm(len(ids), generator=g)[:size]
    noise = torch.randn(size, LONG, EXPERTS, generator=g)
    idx, noise = idx.chunk(world)[rank], noise.chunk(world)[rank]
    return ids[idx], tag[idx], noise
