import torch


def pairs(step, size, rank, world, vocab=64, topics=16):
    """Question and answer bags of tokens about the same topic mix; this rank's share of the batch."""
    g = torch.Generator().manual_seed(4000 + step)
    topic = torch.randint(0, topics, (size, 1), generator=g)
    width = vocab // topics
    mix = torch.randint(0, topics, (size, 1), generator=g)

    def draw(n, swap):
        main = topic * width + torch.randint(0, width, (size, n), generator=g)
        side = mix * width + torch.randint(0, width, (size, n), generator=g)
        return torch.where(torch.rand(size, n, generator=g) < swap, side, main)

    q, a = draw(6, 0.2), draw(10, 0.3)
    share = size // world
    return q[rank * share : (rank + 1) * share], a[rank * share : (rank + 1) * share]
