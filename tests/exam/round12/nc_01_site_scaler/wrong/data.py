"""Synthetic plant runs. Sites are dealt to the ranks, a rank never reads another rank's tables."""
import torch


def _generator(*key):
    seed = 0
    for k in key:
        seed = seed * 7919 + int(k)
    return torch.Generator().manual_seed(seed)


class SiteTable:
    def __init__(self, site, cfg):
        g = _generator(cfg.seed, site)
        z = torch.randn(cfg.rows_per_site, cfg.features, generator=g)
        # climate of the site: later sites are warmer, with wider swings
        centre = torch.linspace(-1.0, 1.0, cfg.features) * 3.0 + 0.6 * site
        spread = 1.0 + 0.15 * site
        self.x = 20.0 + centre + spread * z
        u = (self.x - 22.0) / 4.0
        self.y = torch.sin(u[:, 0]) + 0.4 * u[:, 1] - 0.2 * u[:, 2] * u[:, 3].tanh() + 0.05 * z[:, 4]
        self.site, self.seed = site, cfg.seed

    def batch(self, step, n):
        rows = torch.randperm(len(self.x), generator=_generator(self.seed, self.site, step))[:n]
        return self.x[rows], self.y[rows]


class RankTables:
    def __init__(self, cfg, rank, world):
        if cfg.sites % world:
            raise SystemExit(f"{cfg.sites} sites cannot be dealt evenly to {world} ranks")
        per_rank = cfg.sites // world
        self.tables = [SiteTable(s, cfg) for s in range(rank * per_rank, (rank + 1) * per_rank)]

    def all_features(self):
        return torch.cat([t.x for t in self.tables])

    def batch(self, step, n):
        parts = [t.batch(step, n) for t in self.tables]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
