"""Galaxies in a periodic box: positions from clustered haloes; the target is the local halo mass."""
import torch


def make_box(n=203, k=6, seed=51):
    g = torch.Generator().manual_seed(seed)
    centres = torch.rand(14, 3, generator=g)
    mass = 0.5 + torch.rand(14, generator=g) * 2
    which = torch.randint(0, 14, (n,), generator=g)
    pos = (centres[which] + 0.03 * mass[which, None] * torch.randn(n, 3, generator=g)) % 1.0
    pos = pos[torch.argsort(pos[:, 0])]                      # slabs along x, so that parts are local
    sep = pos[:, None] - pos[None]
    sep = sep - sep.round()
    d = sep.square().sum(-1) + 10 * torch.eye(n)
    near = d.topk(k, largest=False).indices                  # for each galaxy its neighbours
    rel = sep[torch.arange(n)[:, None], near] * 10
    dens = (d < 0.02).float().sum(1) / 10
    bright = 0.5 * torch.randn(n, generator=g) + dens
    feats = torch.stack([bright, torch.ones(n)], 1)
    target = (dens + dens[near].mean(1)).log1p()
    train = torch.rand(n, generator=g) < 0.7
    return feats, near, rel, target, train


def split_sizes(n, world):
    return [n // world + (1 if r < n % world else 0) for r in range(world)]
