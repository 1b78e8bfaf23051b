import torch
import torch.distributed as dist


class ArmPosterior:
    """Bayesian linear regression on network features, one per arm. Sums are over all ranks' rounds."""

    def __init__(self, arms, dim, ridge=1.0, noise=0.1):
        self.ridge, self.noise = ridge, noise
        self.xx = torch.zeros(arms, dim, dim, dtype=torch.float64)
        self.xy = torch.zeros(arms, dim, dtype=torch.float64)

    def sums(self, feats, arms, rewards):
        f = feats.double()
        one_hot = torch.nn.functional.one_hot(arms, len(self.xx)).double()
        xx = torch.einsum("na,ni,nj->aij", one_hot, f, f)
        xy = torch.einsum("na,ni,n->ai", one_hot, f, rewards.double())
        dist.all_reduce(xx)
        dist.all_reduce(xy)
        return xx, xy

    def add(self, *rows):
        xx, xy = self.sums(*rows)
        self.xx += xx
        self.xy += xy

    def rebuild(self, *rows):
        self.xx, self.xy = self.sums(*rows)

    def draw(self, generator):
        eye = torch.eye(self.xx.shape[-1], dtype=torch.float64)
        chol = torch.linalg.cholesky(self.xx + self.ridge * eye)
        mean = torch.cholesky_solve(self.xy[..., None], chol)
        z = torch.randn(mean.shape, generator=generator, dtype=torch.float64)
        z = torch.linalg.solve_triangular(chol.mT, z, upper=True)
        return (mean + self.noise * z).squeeze(-1)
