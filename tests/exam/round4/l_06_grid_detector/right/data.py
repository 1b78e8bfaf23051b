import torch

GRID, CELL = 4, 4
SIZE = GRID * CELL


def scenes(n, seed):
    """Images with 0 to 5 bright rectangles; at most one centre per grid cell."""
    g = torch.Generator().manual_seed(seed)
    img = 0.1 * torch.randn(n, 1, SIZE, SIZE, generator=g)
    obj = torch.zeros(n, GRID, GRID)
    box = torch.zeros(n, GRID, GRID, 4)
    for i in range(n):
        for _ in range(int(torch.randint(0, 6, (1,), generator=g))):
            cy, cx = (torch.rand(2, generator=g) * SIZE).tolist()
            h, w = (1.5 + 3.5 * torch.rand(2, generator=g)).tolist()
            r, c = int(cy // CELL), int(cx // CELL)
            if obj[i, r, c]:
                continue
            y0, y1 = int(max(cy - h / 2, 0)), int(min(cy + h / 2, SIZE - 1)) + 1
            x0, x1 = int(max(cx - w / 2, 0)), int(min(cx + w / 2, SIZE - 1)) + 1
            img[i, 0, y0:y1, x0:x1] += 1.0
            obj[i, r, c] = 1
            box[i, r, c] = torch.tensor([cy / CELL - r, cx / CELL - c, h / CELL, w / CELL])
    return img, obj, box


def batches(n, size, steps, rank, world, seed=2):
    g = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randperm(n, generator=g)[:size][rank::world]
