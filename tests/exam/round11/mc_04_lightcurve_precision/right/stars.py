import torch


def make_survey(stars=24, visits=64, seed=4):
    """Photometry of short-period variables. Times are Julian dates and therefore float64."""
    g = torch.Generator().manual_seed(seed)
    period = 0.3 + 0.5 * torch.rand(stars, generator=g, dtype=torch.float64)
    epoch0 = 2459000.5 + torch.rand(stars, generator=g, dtype=torch.float64)
    star = torch.arange(stars).repeat_interleave(visits)
    jd = 2459000.5 + 90 * torch.rand(stars * visits, generator=g, dtype=torch.float64)
    phase = ((jd - epoch0[star]) / period[star]) % 1.0
    depth = 0.4 + 0.6 * torch.rand(stars, generator=g, dtype=torch.float64)
    mag = depth[star] * (torch.cos(6.283185307 * phase) + 0.5 * torch.sin(2 * 6.283185307 * phase))
    mag = (mag + 0.05 * torch.randn(len(star), generator=g, dtype=torch.float64)).float()
    return star, jd, period, epoch0, mag
