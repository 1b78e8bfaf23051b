import torch


class Scenes:
    """16x16 images with one bright box each; targets on a 4x4 grid: centre heat map, box size at the centre cell."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.images = 0.4 * torch.randn(n, 1, 16, 16, generator=g)
        self.heat = torch.zeros(n, 4, 4)
        self.size = torch.zeros(n, 2)
        for i in range(n):
            h, w = torch.randint(3, 8, (2,), generator=g).tolist()
            top = int(torch.randint(0, 16 - h, (1,), generator=g))
            left = int(torch.randint(0, 16 - w, (1,), generator=g))
            self.images[i, 0, top:top + h, left:left + w] += 1.5
            self.heat[i, (top + h // 2) // 4, (left + w // 2) // 4] = 1.0
            self.size[i] = torch.tensor([h, w]) / 8.0

    def __len__(self):
        return len(self.images)

    def take(self, idx):
        return self.images[idx], self.heat[idx], self.size[idx]
