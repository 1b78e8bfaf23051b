import torch

OBS, ACT = 6, 2


class OfflineDataset:
    """Logged transitions of a damped linear system under a random behaviour policy."""

    def __init__(self, n=4096, seed=31):
        g = torch.Generator().manual_seed(seed)
        a_mat = 0.9 * torch.linalg.qr(torch.randn(OBS, OBS, generator=g))[0]
        b_mat = 0.5 * torch.randn(ACT, OBS, generator=g)
        self.obs = torch.randn(n, OBS, generator=g)
        self.act = torch.rand(n, ACT, generator=g) * 2 - 1
        self.next = self.obs @ a_mat + self.act @ b_mat
        self.rew = 1.0 - 0.2 * self.next.square().sum(-1)
        self.seed = seed

    def sample(self, step, size, rank, world):
        g = torch.Generator().manual_seed(self.seed + 97 * step)
        idx = torch.randint(0, len(self.obs), (size,), generator=g)
        noise = torch.randn(size, ACT, generator=g)
        idx, noise = idx.chunk(world)[rank], noise.chunk(world)[rank]
        return self.obs[idx], self.act[idx], self.rew[idx], self.next[idx], noise
