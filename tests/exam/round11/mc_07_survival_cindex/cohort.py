import torch


def make_cohort(n=720, columns=10, seed=13):
    """Patients with right-censored follow-up."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, columns, generator=g)
    x[:, 0] = (torch.arange(n) * 3 // n).float() - 1       # site: the clinics differ in case mix
    hazard = 1.3 * x[:, 0] + 0.7 * x[:, 1] - 0.6 * x[:, 2] * x[:, 3] + 0.4 * x[:, 4].clamp_min(0)
    life = -torch.log(torch.rand(n, generator=g)) * torch.exp(-hazard)
    cens = -torch.log(torch.rand(n, generator=g)) * 3.0
    return x, torch.minimum(life, cens), (life <= cens).float()


def split(n, seed=0):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[:480], order[480:].sort().values
