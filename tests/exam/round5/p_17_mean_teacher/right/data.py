import torch


class SemiSupervised:
    def __init__(self, seed=9, labelled=48, unlabelled=512):
        g = torch.Generator().manual_seed(seed)
        self.centres = 1.5 * torch.randn(3, 8, generator=g)
        self.y = torch.randint(0, 3, (labelled,), generator=g)
        self.x = self.centres[self.y] + torch.randn(labelled, 8, generator=g)
        self.u = self.centres[torch.randint(0, 3, (unlabelled,), generator=g)] + torch.randn(unlabelled, 8, generator=g)

    def draw(self, step, n_lab, n_unl, rank, world):
        """Two noisy views of the unlabelled rows, one clean view of the labelled ones; rank's share of each."""
        g = torch.Generator().manual_seed(77_000 + step)
        i = torch.randint(0, len(self.x), (n_lab,), generator=g)
        j = torch.randint(0, len(self.u), (n_unl,), generator=g)
        v1 = self.u[j] + 0.3 * torch.randn(n_unl, 8, generator=g)
        v2 = self.u[j] + 0.3 * torch.randn(n_unl, 8, generator=g)
        return [t.chunk(world)[rank] for t in (self.x[i], self.y[i], v1, v2)]
