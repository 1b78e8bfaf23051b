import torch


def make_panel(n_series=160, length=40, horizon=6, seed=0):
    """Sensors with daily rhythm and outages. The sensors are ordered by installation date; old ones
    drop out far more often and have drifted from the new ones."""
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length + horizon, dtype=torch.float32)
    age = torch.linspace(1, 0, n_series)
    phase = torch.rand(n_series, generator=g) * 6.28
    amp = 0.5 + torch.rand(n_series, generator=g)
    x = amp[:, None] * torch.sin(t / 3.8 + phase[:, None]) + 0.9 * age[:, None] * torch.cos(t / 2.1)[None]
    x = x + 0.05 * torch.randn(x.shape, generator=g)
    p_missing = 0.05 + 0.8 * age
    seen = (torch.rand(x.shape, generator=g) > p_missing[:, None]).float()
    seen[:, length] = 1.0
    return x, seen, length


class BatchPlan:
    """Deterministic plan of the global batches: strata of the panel, so that every batch has old and new sensors."""

    def __init__(self, n_series, batch_size, seed):
        self.n, self.b, self.seed = n_series, batch_size, seed

    def global_batch(self, step):
        per_epoch = self.n // self.b
        g = torch.Generator().manual_seed(self.seed * 7919 + step // per_epoch)
        rows = torch.arange(self.n).view(self.b, per_epoch)
        pick = torch.stack([r[torch.randperm(per_epoch, generator=g)] for r in rows])
        return pick[:, step % per_epoch]
