import torch


def volumes(n, seed, side=12):
    """slices with an organ and perhaps a tumour in it"""
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    cx, cy = (4 + 4 * torch.rand(2, n, 1, 1, generator=g))
    r = 2.5 + 2 * torch.rand(n, 1, 1, generator=g)
    d = ((xx - cx) ** 2 + (yy - cy) ** 2).sqrt()
    organ, tumour = d < r, d < r * 0.45 * (torch.rand(n, 1, 1, generator=g) < 0.6)
    target = organ.long() + tumour.long()
    image = organ.float() + 0.9 * tumour.float() + 0.35 * torch.randn(n, side, side, generator=g)
    return image[:, None], target
