"""The order of updates as a generator: two critic updates, then one generator update."""
import torch
import torch.nn.functional as F


def real(tick, n):
    g = torch.Generator().manual_seed(10_000 + tick)
    a = torch.rand(n, generator=g) * 6.2832
    return torch.stack([a.cos(), a.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g)


def latent(tick, n):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(20_000 + tick))


def phases(tick):
    while True:
        yield tick, "G" if tick % 3 == 2 else "C"
        tick += 1


def critic_loss(gen, cri, x, z):
    with torch.no_grad():
        fake = gen(z)
    score = cri(torch.cat([x, fake]))  # one pass over both halves
    r, f = score.chunk(2)
    return F.softplus(-r).mean() + F.softplus(f).mean()


def generator_loss(gen, cri, z):
    return F.softplus(-cri(gen(z))).mean()
