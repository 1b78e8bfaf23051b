import torch


def make_scenes(n, size=16, grid=4, classes=3, seed=0):
    """Images with one to six coloured rectangles; targets are laid out on the grid."""
    g = torch.Generator().manual_seed(seed)
    images = 0.2 * torch.randn(n, 3, size, size, generator=g)
    cls = torch.zeros(n, classes, grid, grid)
    box = torch.zeros(n, 4, grid, grid)
    cell = size // grid
    for i in range(n):
        count = int(torch.randint(1, 7, (), generator=g))
        for k in torch.randperm(grid * grid, generator=g)[:count].tolist():
            r, c = divmod(k, grid)
            kind = int(torch.randint(classes, (), generator=g))
            h, w = torch.randint(2, cell + 1, (2,), generator=g).tolist()
            y, x = r * cell, c * cell
            images[i, kind, y:y + h, x:x + w] += 1.5
            cls[i, kind, r, c] = 1
            box[i, :, r, c] = torch.tensor([h / 2, w / 2, h, w]) / cell
    return images, cls, box
