import torch


class Textures:
    def __init__(self, n=800, seed=5):
        g = torch.Generator().manual_seed(seed)
        base = torch.randn(10, 1, 12, 12, generator=g)
        self.label = torch.randint(0, 10, (n,), generator=g)
        self.x = base[self.label] + 0.6 * torch.randn(n, 1, 12, 12, generator=g)

    def __len__(self):
        return len(self.x)


def augment(x, g):
    flip = torch.rand(len(x), generator=g) < 0.5
    x = torch.where(flip[:, None, None, None], x.flip(-1), x)
    drop = (torch.rand(x.shape, generator=g) > 0.15).float()
    return x * drop + 0.2 * torch.randn(x.shape, generator=g)


def stream(ds, batch, start):
    """Endless stream of (step, view1, view2) over the global batch, restartable at any step."""
    per_epoch, step = len(ds) // batch, start
    while True:
        epoch, i = divmod(step, per_epoch)
        order = torch.randperm(len(ds), generator=torch.Generator().manual_seed(epoch))
        x = ds.x[order[i * batch : (i + 1) * batch]]
        g = torch.Generator().manual_seed(2**20 + step)
        yield step, augment(x, g), augment(x, g)
        step += 1
