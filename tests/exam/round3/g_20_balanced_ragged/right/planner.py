"""Every rank computes the same plan: documents go to the rank with the fewest tokens so far, then into micro-batches of bounded size."""

import torch

IGNORE = -100
FILLER = torch.zeros(5, dtype=torch.long)


def assign(docs, world):
    load, bins = [0] * world, [[] for _ in range(world)]
    for d in sorted(range(len(docs)), key=lambda d: (-len(docs[d]), d)):
        target = load.index(min(load))
        bins[target].append(d)
        load[target] += len(docs[d]) - 1
    return bins


def micro_batches(bin_, docs, limit=40):
    """groups whose padded size stays below the limit"""
    groups = []
    for d in bin_:  # longest first
        if groups and len(docs[groups[-1][0]]) * (len(groups[-1]) + 1) <= limit:
            groups[-1].append(d)
        else:
            groups.append([d])
    return groups


def plan(docs, rank, world):
    per_rank = [micro_batches(b, docs) for b in assign(docs, world)]
    rounds = max(len(g) for g in per_rank)
    tokens = sum(len(d) - 1 for d in docs)
    mine = per_rank[rank] + [[]] * (rounds - len(per_rank[rank]))
    return mine, tokens


def tensors(group, docs):
    """an empty group still gives a batch, so that all ranks take part in the collectives; none of its labels counts"""
    chosen = [docs[d] for d in group] or [FILLER]
    ids = torch.nn.utils.rnn.pad_sequence([d[:-1] for d in chosen], batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence([d[1:] for d in chosen], batch_first=True, padding_value=IGNORE)
    return ids, labels if group else torch.full_like(labels, IGNORE)
