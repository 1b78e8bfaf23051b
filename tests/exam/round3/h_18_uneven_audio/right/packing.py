import torch
import torch.distributed as dist


def corpus(n=256, bands=8):
    """Clips of 5 to 40 frames with a label per frame."""
    g = torch.Generator().manual_seed(41)
    w = torch.randn(bands, 3, generator=g)
    clips = []
    for _ in range(n):
        x = torch.randn(int(torch.randint(5, 41, (1,), generator=g)), bands, generator=g)
        clips.append((x, (x @ w).argmax(1)))
    return clips


def deal(lengths, world):
    """Longest first, each to the rank with the fewest frames so far; ranks get different numbers of clips."""
    load, hands = [0] * world, [[] for _ in range(world)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        r = load.index(min(load))
        load[r] += lengths[i]
        hands[r].append(i)
    return hands


def micro_batches(clips, budget):
    """Packs clips until the padded size would exceed the frame budget."""
    out, cur = [], []
    for c in clips:
        longest = max(len(v[0]) for v in cur + [c])
        if cur and longest * (len(cur) + 1) > budget:
            out.append(cur)
            cur = []
        cur.append(c)
    return out + ([cur] if cur else [])


def collate(part, bands=8):
    if not part:  # a filler, so that all ranks run the same number of passes
        return torch.zeros(1, 5, bands), torch.zeros(1, 5, dtype=torch.long), torch.zeros(1, 5)
    n = max(len(x) for x, _ in part)
    x, y, m = torch.zeros(len(part), n, bands), torch.zeros(len(part), n, dtype=torch.long), torch.zeros(len(part), n)
    for i, (a, b) in enumerate(part):
        x[i, : len(a)], y[i, : len(b)], m[i, : len(a)] = a, b, 1
    return x, y, m


def plan(clips, budget):
    parts = micro_batches(clips, budget)
    n = torch.tensor(len(parts))
    dist.all_reduce(n, op=dist.ReduceOp.MAX)
    return [collate(q) for q in parts + [[]] * (int(n) - len(parts))]
