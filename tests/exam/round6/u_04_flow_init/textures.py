import torch


class Textures:
    """6x6 patches: smooth stripes of random phase with an uneven gain and offset per pixel."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        fixed = torch.Generator().manual_seed(77)
        self.gain = 0.2 + 6 * torch.rand(36, generator=fixed)
        self.offset = 8 * torch.randn(36, generator=fixed)

    def batch(self, n):
        ys, xs = torch.meshgrid(torch.arange(6.0), torch.arange(6.0), indexing="ij")
        angle = torch.rand(n, 1, 1, generator=self.gen) * torch.pi
        phase = torch.rand(n, 1, 1, generator=self.gen) * 2 * torch.pi
        img = torch.sin(ys * angle.cos() + xs * angle.sin() + phase).flatten(1)
        img = img + 0.3 * torch.randn(img.shape, generator=self.gen)
        return img * self.gain + self.offset
