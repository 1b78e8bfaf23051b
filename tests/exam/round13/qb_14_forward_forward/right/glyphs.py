import torch

CLASSES, SIDE = 4, 6
PROTO = (torch.rand(CLASSES, SIDE * SIDE, generator=torch.Generator().manual_seed(8)) < 0.4).float()


def draw(seed, n):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (n,), generator=g)
    x = PROTO[y] + 0.3 * torch.randn(n, SIDE * SIDE, generator=g)
    wrong = (y + torch.randint(1, CLASSES, (n,), generator=g)) % CLASSES
    return x, y, wrong


def with_label(x, y):
    return torch.cat([3.0 * torch.nn.functional.one_hot(y, CLASSES).float(), x], 1)
