import torch


def textures(n=192, size=12, seed=70):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    angle = torch.rand(n, 1, 1, generator=g) * 3.14159
    freq = 0.4 + torch.rand(n, 1, 1, generator=g)
    img = torch.sin(freq * (yy * angle.sin() + xx * angle.cos()) + 6 * torch.rand(n, 1, 1, generator=g))
    return img.unsqueeze(1)


def view(x, ids, step, k):
    out = torch.empty_like(x)
    for r, i in enumerate(ids.tolist()):
        g = torch.Generator().manual_seed(i * 100003 + step * 2 + k)
        s = torch.randint(-2, 3, (2,), generator=g).tolist()
        out[r] = torch.roll(x[r], s, (1, 2)) * (0.7 + 0.6 * torch.rand(1, generator=g))
        out[r] += 0.2 * torch.randn(x[r].shape, generator=g)
    return out
