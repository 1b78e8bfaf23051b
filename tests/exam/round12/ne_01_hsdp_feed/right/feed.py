import torch


def make_impressions(cfg):
    g = torch.Generator().manual_seed(cfg.seed)
    fields = torch.randint(0, cfg.buckets, (cfg.rows, cfg.n_fields), generator=g)
    affinity = torch.randn(cfg.n_fields, cfg.buckets, generator=g)
    logit = torch.stack([affinity[f][fields[:, f]] for f in range(cfg.n_fields)]).sum(0)
    logit = logit + 0.7 * affinity[0][fields[:, 0]] * affinity[1][fields[:, 1]]
    clicks = (torch.rand(cfg.rows, generator=g) < torch.sigmoid(1.5 * logit)).float()
    return fields, clicks


class ImpressionFeed:
    """Shuffled passes over the log; every data-parallel slot takes its slice of the global batch."""

    def __init__(self, cfg, mesh):
        self.fields, self.clicks = make_impressions(cfg)
        self.batch, self.seed = cfg.batch, cfg.seed
        self.per_pass = len(self.clicks) // cfg.batch
        slots = mesh.size()
        slot = mesh.get_local_rank("replicate") * mesh["shard"].size() + mesh.get_local_rank("shard")
        width = cfg.batch // slots
        self.window = slice(slot * width, (slot + 1) * width)

    def __call__(self, step):
        epoch, pos = divmod(step, self.per_pass)
        g = torch.Generator().manual_seed(self.seed + 7919 * (epoch + 1))
        order = torch.randperm(len(self.clicks), generator=g)
        rows = order[pos * self.batch:(pos + 1) * self.batch][self.window]
        return self.fields[rows], self.clicks[rows]
