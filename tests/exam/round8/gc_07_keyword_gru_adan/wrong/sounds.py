import torch


class Keywords:
    """Spectrogram-like sequences: each keyword is a fixed path of frequency bands, stretched and noisy."""

    def __init__(self, words=6, frames=20, bands=16, seed=4):
        g = torch.Generator().manual_seed(seed)
        self.words, self.frames, self.bands = words, frames, bands
        self.paths = torch.randint(0, bands, (words, 5), generator=g)

    def draw(self, n, gen):
        y = torch.randint(0, self.words, (n,), generator=gen)
        pos = torch.linspace(0, 4.99, self.frames)[None] + 0.6 * torch.randn(n, 1, generator=gen)
        band = torch.gather(self.paths[y], 1, pos.clamp(0, 4.99).long())
        x = torch.nn.functional.one_hot(band, self.bands).float()
        return x + 0.7 * torch.randn(x.shape, generator=gen), y
