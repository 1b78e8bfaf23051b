"""Synthetic scenes: background, discs (rare) and stripes; a part of each scene is not annotated."""
import torch

VOID = 255
CLASSES = 3


def make_scenes(n, size=16, seed=3):
    g = torch.Generator().manual_seed(seed)
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    images, labels = [], []
    for _ in range(n):
        label = torch.zeros(size, size, dtype=torch.long)
        if torch.rand(1, generator=g) < 0.6:
            col = int(torch.randint(0, size - 3, (1,), generator=g))
            label[:, col:col + 3] = 1
        if torch.rand(1, generator=g) < 0.4:
            cy, cx = torch.randint(3, size - 3, (2,), generator=g).tolist()
            label[(yy - cy) ** 2 + (xx - cx) ** 2 <= 5] = 2
        image = torch.tensor([0.0, 0.7, 1.2])[label] + 0.35 * torch.randn(size, size, generator=g)
        # annotators stop somewhere: everything below that row is void
        rows = int(torch.randint(2, size + 1, (1,), generator=g))
        label[rows:] = VOID
        images.append(image[None])
        labels.append(label)
    return torch.stack(images), torch.stack(labels)
