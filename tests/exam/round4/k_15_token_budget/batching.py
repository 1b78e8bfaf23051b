"""Dynamic batching: the documents of a step are cut into micro batches of at most `budget` padded tokens.

The plan is a pure function of (step, world size, budget): every rank works out the whole plan and takes its own part."""
import torch

VOCAB, IGNORE = 30, -100


def doc(i):
    g = torch.Generator().manual_seed(i + 77)
    n = int(torch.randint(6, 30, (1,), generator=g))
    start, stride = torch.randint(VOCAB, (2,), generator=g).tolist()
    return [(start + (stride % 3 + 1) * k) % VOCAB for k in range(n)]


def plan(step, docs_per_step, budget, world):
    """-> for each rank a list of micro batches (lists of document numbers), all lists of the same length."""
    ids = sorted(range(step * docs_per_step, (step + 1) * docs_per_step), key=lambda i: (-len(doc(i)), i))
    per_rank = []
    for r in range(world):
        micro, current, width = [], [], 0
        for i in ids[r::world]:
            width = max(width, len(doc(i)))
            if current and width * (len(current) + 1) > budget:
                micro.append(current)
                current, width = [], len(doc(i))
            current.append(i)
        micro.append(current)
        per_rank.append(micro)
    longest = max(len(m) for m in per_rank)
    for micro in per_rank:
        micro.extend([[]] * (longest - len(micro)))
    return per_rank


def collate(ids):
    """An empty micro batch becomes one dummy row whose labels are all ignored."""
    if not ids:
        return torch.zeros(1, 4, dtype=torch.long), torch.full((1, 4), IGNORE)
    docs = [torch.tensor(doc(i)) for i in ids]
    x = torch.nn.utils.rnn.pad_sequence([d[:-1] for d in docs], batch_first=True)
    y = torch.nn.utils.rnn.pad_sequence([d[1:] for d in docs], batch_first=True, padding_value=IGNORE)
    return x, y
