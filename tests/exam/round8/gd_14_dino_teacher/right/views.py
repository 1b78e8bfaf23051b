"""Pictures of a few textures without labels and their random views, seeded by sample and epoch."""
import torch
import torch.nn.functional as F


def make_pictures(n=128, size=16):
    g = torch.Generator().manual_seed(12)
    kind = torch.arange(n) % 4
    base = F.interpolate(torch.randn(4, 1, 6, 6, generator=g), size=size, mode="bilinear")
    return base[kind] + 0.3 * torch.randn(n, 1, size, size, generator=g), kind


def crop(picture, side, g):
    limit = picture.shape[-1] - side + 1
    y, x = torch.randint(limit, (2,), generator=g).tolist()
    view = picture[:, y:y + side, x:x + side]
    if torch.rand(1, generator=g) < 0.5:
        view = view.flip(-1)
    gain = 0.8 + 0.4 * torch.rand(1, generator=g)
    return F.interpolate((view * gain)[None], size=12, mode="nearest")[0]


def views(pictures, index, epoch):
    """Two large and two small views, stacked view by view."""
    out = [[], [], [], []]
    for i in index.tolist():
        g = torch.Generator().manual_seed(epoch * 10007 + i)
        for slot, side in enumerate((14, 14, 8, 8)):
            out[slot].append(crop(pictures[i], side, g))
    return [torch.stack(v) for v in out]
