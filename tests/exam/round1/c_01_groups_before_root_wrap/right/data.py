import torch


class SuccessorData:
    """Sequences x_{i+1} = (a * x_i + c) mod vocab with a few symbols of noise."""

    def __init__(self, cfg, rank, world, size=512):
        g = torch.Generator().manual_seed(cfg.seed + 1)
        seqs = [torch.randint(cfg.model.vocab, (size,), generator=g)]
        for _ in range(cfg.model.seq):
            seqs.append((seqs[-1] * 5 + 3) % cfg.model.vocab)
        self.data = torch.stack(seqs, 1)
        self.batch, self.rank, self.world, self.seed = cfg.global_batch, rank, world, cfg.seed

    def __iter__(self):
        epoch = 0
        while True:
            perm = torch.randperm(len(self.data), generator=torch.Generator().manual_seed(self.seed * 1000 + epoch))
            for i in range(0, len(perm) - self.batch + 1, self.batch):
                rows = self.data[perm[i : i + self.batch][self.rank :: self.world]]
                yield rows[:, :-1], rows[:, 1:]
            epoch += 1
