import torch


class MarkovText:
    """Sequences of a fixed random Markov chain; batch `step` is always the same."""

    def __init__(self, cfg, rank, world):
        self.cfg, self.rank, self.world = cfg, rank, world
        g = torch.Generator().manual_seed(cfg.seed + 7)
        self.table = torch.softmax(2.5 * torch.randn(cfg.vocab, cfg.vocab, generator=g), dim=-1)

    def batch(self, step):
        g = torch.Generator().manual_seed(self.cfg.seed * 1000 + step)
        ids = torch.randint(self.cfg.vocab, (self.cfg.batch_size, 1), generator=g)
        for _ in range(self.cfg.seq_len):
            nxt = torch.multinomial(self.table[ids[:, -1]], 1, generator=g)
            ids = torch.cat([ids, nxt], dim=1)
        ids = ids.chunk(self.world)[self.rank]
        return ids[:, :-1], ids[:, 1:]
