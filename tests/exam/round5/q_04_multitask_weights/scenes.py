import torch


def scenes(n, seed, size=10):
    """Random two-plane scenes with depth, a segmentation and its edges. Later scenes are noisier."""
    g = torch.Generator().manual_seed(seed)
    grid = torch.linspace(-1, 1, size)
    yy, xx = torch.meshgrid(grid, grid, indexing="ij")
    ang = torch.rand(n, 1, 1, generator=g) * 6.28
    off = torch.rand(n, 1, 1, generator=g) - 0.5
    plane = ang.cos() * xx + ang.sin() * yy - off
    seg = (plane > 0).long() + ((plane > 0.5)).long()
    depth = 1 + seg.float() + 0.3 * plane
    edge = (plane.abs() < 0.15).float()
    noise = torch.linspace(0.1, 0.6, n)[:, None, None, None]
    img = torch.stack([depth - 2, plane, seg.float() - 1], 1) + noise * torch.randn(n, 3, size, size, generator=g)
    return img, {"depth": depth, "seg": seg, "edge": edge}


def batch_at(data, step, size, rank, world):
    img, target = data
    g = torch.Generator().manual_seed(9000 + step)
    idx = torch.randint(len(img), (size,), generator=g)
    idx = idx.sort().values.chunk(world)[rank]
    return img[idx], {k: v[idx] for k, v in target.items()}
