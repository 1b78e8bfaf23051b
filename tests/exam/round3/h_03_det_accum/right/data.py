import torch

GRID, CELL = 4, 4


def make_scene(i, seed=11):
    """A 16x16 picture with 0 to 6 bright boxes, at most one per 4x4 cell."""
    g = torch.Generator().manual_seed(seed * 100003 + i)
    img = 0.1 * torch.randn(1, 16, 16, generator=g)
    obj, box = torch.zeros(GRID, GRID), torch.zeros(GRID, GRID, 2)
    n = int(torch.randint(0, 7, (1,), generator=g)) if i % 3 else 0
    for c in torch.randperm(GRID * GRID, generator=g)[:n].tolist():
        r, q = divmod(c, GRID)
        h, w = (int(v) for v in torch.randint(1, 4, (2,), generator=g))
        img[0, r * CELL : r * CELL + h, q * CELL : q * CELL + w] += 1.0
        obj[r, q] = 1
        box[r, q] = torch.tensor([h / CELL, w / CELL])
    return img, obj, box


class Scenes:
    def __init__(self, n=256):
        rows = [make_scene(i) for i in range(n)]
        self.img, self.obj, self.box = (torch.stack(c) for c in zip(*rows))

    def step_slice(self, step, global_batch, rank, world):
        g = torch.Generator().manual_seed(step)
        idx = torch.randint(0, len(self.img), (global_batch,), generator=g)
        idx = idx.chunk(world)[rank]
        return self.img[idx], self.obj[idx], self.box[idx]
