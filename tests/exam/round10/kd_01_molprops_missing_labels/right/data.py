"""Synthetic molecules: small random graphs with several assay read-outs, most of them unmeasured."""
import torch

N_TASKS = 5


def make_dataset(n_mol=192, n_atoms=9, n_types=6, seed=11):
    g = torch.Generator().manual_seed(seed)
    types = torch.randint(0, n_types, (n_mol, n_atoms), generator=g)
    adj = (torch.rand(n_mol, n_atoms, n_atoms, generator=g) < 0.25).float()
    adj = ((adj + adj.transpose(1, 2)) > 0).float()
    adj = adj * (1 - torch.eye(n_atoms))
    w = torch.randn(n_types, N_TASKS, generator=g)
    deg = adj.sum(-1, keepdim=True)
    y = (w[types] * (1 + 0.3 * deg)).mean(1) + 0.05 * torch.randn(n_mol, N_TASKS, generator=g)
    # assays were run on different sub-libraries, so coverage depends on the compound series
    series = torch.arange(n_mol) % 4
    coverage = torch.tensor([[0.9, 0.2, 0.6, 0.3, 0.7],
                             [0.2, 0.8, 0.3, 0.6, 0.3],
                             [0.8, 0.3, 0.2, 0.9, 0.5],
                             [0.3, 0.6, 0.8, 0.2, 0.2]])
    measured = torch.rand(n_mol, N_TASKS, generator=g) < coverage[series]
    return types, adj, y, measured


class EpochSampler:
    """Same permutation on every rank; a rank takes its stride of each global batch."""

    def __init__(self, n, global_batch, rank, world, seed):
        self.n, self.gb, self.rank, self.world, self.seed = n, global_batch, rank, world, seed
        self.per_epoch = n // global_batch

    def batch(self, step):
        epoch, i = divmod(step, self.per_epoch)
        g = torch.Generator().manual_seed(self.seed + epoch)
        perm = torch.randperm(self.n, generator=g)
        ids = perm[i * self.gb:(i + 1) * self.gb]
        ids = ids[torch.argsort(ids % 4, stable=True)]      # keep compound series together
        per = self.gb // self.world
        return ids[self.rank * per:(self.rank + 1) * per]
