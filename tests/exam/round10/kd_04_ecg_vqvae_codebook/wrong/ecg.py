import torch


def beats(n=256, length=64, seed=4):
    """Single synthetic heart beats (P, QRS, T waves), a third of them ectopic."""
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, length)

    def wave(centre, width, height):
        return height * torch.exp(-((t - centre) / width) ** 2)

    shift = 0.05 * torch.randn(n, 1, generator=g)
    amp = 1 + 0.2 * torch.randn(n, 3, 1, generator=g)
    ectopic = (torch.arange(n) % 3 == 0).float()[:, None]
    x = amp[:, 0] * wave(0.2 + shift, 0.05, 0.25) * (1 - ectopic)
    x = x + amp[:, 1] * wave(0.45 + shift, 0.03 + 0.04 * ectopic, 1.2)
    x = x - wave(0.52 + shift, 0.03, 0.4) * (1 - 0.5 * ectopic)
    x = x + amp[:, 2] * wave(0.75 + shift, 0.08, 0.35) * (1 - 2 * ectopic)
    return (x + 0.02 * torch.randn(n, length, generator=g)) * 2
