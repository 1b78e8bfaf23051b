import torch


def shapes(n=256, size=10, seed=3):
    """Bars with one of four orientations, the class of the linear probe."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 4
    img = torch.zeros(n, 1, size, size)
    for i in range(n):
        k = int(torch.randint(2, size - 2, (1,), generator=g))
        if y[i] == 0:
            img[i, 0, k] = 1
        elif y[i] == 1:
            img[i, 0, :, k] = 1
        elif y[i] == 2:
            img[i, 0] += torch.eye(size)
        else:
            img[i, 0] += torch.eye(size).flip(1)
    return img + 0.1 * torch.randn(img.shape, generator=g), y


def augment(x, ids, step, which):
    """Shift and noise that depend only on the image, the step and the view."""
    out = []
    for img, i in zip(x, ids.tolist()):
        g = torch.Generator().manual_seed((i * 9176 + step) * 2 + which)
        dy, dx = torch.randint(-1, 2, (2,), generator=g).tolist()
        gain = 0.8 + 0.4 * torch.rand(1, generator=g)
        out.append(torch.roll(img, (dy, dx), (1, 2)) * gain + 0.1 * torch.randn(img.shape, generator=g))
    return torch.stack(out)
