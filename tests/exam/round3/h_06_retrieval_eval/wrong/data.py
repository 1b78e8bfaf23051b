import torch


def make_split(n, classes=40, dim=40, seed=0, noise=0.5):
    """Class prototypes plus noise that lives mostly in nuisance directions."""
    base = torch.Generator().manual_seed(1000)
    proto = torch.randn(classes, 10, generator=base)
    mix = torch.randn(10 + 10, dim, generator=base) / 3
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    z = torch.cat([proto[y] + noise * torch.randn(n, 10, generator=g), 1.0 * torch.randn(n, 10, generator=g)], 1)
    perm = torch.randperm(n, generator=g)
    return (z @ mix)[perm], y[perm]


def batches(n, batch, steps, rank, world):
    step, epoch = 0, 0
    while step < steps:
        order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch))
        for chunk in order.split(batch):
            if len(chunk) < batch or step == steps:
                break
            yield step, chunk[rank::world]
            step += 1
        epoch += 1
