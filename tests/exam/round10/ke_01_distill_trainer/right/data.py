import torch


class InstructionBatches:
    """Synthetic prompt/answer pairs; only answer tokens carry a label, and answers are of very different lengths."""

    def __init__(self, cfg, rank, world):
        self.cfg, self.rank, self.world = cfg, rank, world

    def step_batches(self, step):
        cfg = self.cfg
        g = torch.Generator().manual_seed(cfg.seed * 1000 + step)
        b, t = cfg.global_batch, cfg.max_len
        start = torch.randint(0, cfg.vocab, (b, 1), generator=g)
        stride = torch.randint(1, 4, (b, 1), generator=g)
        ids = (start + stride * torch.arange(t + 1)) % cfg.vocab
        answer = torch.randint(2, t - 3, (b,), generator=g)
        pos = torch.arange(t)
        keep = (pos >= 3) & (pos < 3 + answer[:, None])
        labels = torch.where(keep, ids[:, 1:], torch.full_like(ids[:, 1:], -100))
        per_rank = b // self.world
        mine = slice(self.rank * per_rank, (self.rank + 1) * per_rank)
        x, y = ids[mine, :-1], labels[mine]
        return list(zip(x.chunk(cfg.accum), y.chunk(cfg.accum)))
