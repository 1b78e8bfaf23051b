import torch


class TokenWindows:
    """windows of a token stream; the window of (step, row) is a pure function of the seed"""

    def __init__(self, cfg, rank, world):
        g = torch.Generator().manual_seed(cfg.seed)
        rule = torch.randperm(cfg.vocab, generator=g)
        token, stream = 0, []
        flips = torch.rand(6000, generator=g)
        jumps = torch.randint(0, cfg.vocab, (6000,), generator=g)
        for i in range(6000):
            stream.append(token)
            token = int(jumps[i]) if flips[i] < 0.08 else int(rule[token])
        self.stream, self.cfg, self.rank, self.world = torch.tensor(stream), cfg, rank, world

    def at(self, step):
        c = self.cfg
        g = torch.Generator().manual_seed(c.seed * 100_003 + step)
        starts = torch.randint(0, len(self.stream) - c.context - 1, (c.global_batch,), generator=g)
        mine = starts.chunk(self.world)[self.rank]
        rows = torch.stack([self.stream[s : s + c.context + 1] for s in mine.tolist()])
        return rows[:, :-1], rows[:, 1:]
