import torch


class PairedViews:
    """Pairs of noisy views of a common latent vector; the classes of the latents are skewed."""

    def __init__(self, seed=0, n_class=10, latent=8, d_image=24, d_text=16):
        g = torch.Generator().manual_seed(seed)
        self.seed, self.n_class = seed, n_class
        self.centers = torch.randn(n_class, latent, generator=g) * 1.5
        self.to_image = torch.randn(latent, d_image, generator=g)
        self.to_text = torch.randn(latent, d_text, generator=g)

    def batch(self, step, size):
        g = torch.Generator().manual_seed(self.seed * 7919 + step + 1)
        # sorted by class, as shards of a real archive are: a rank gets neighbouring classes
        cls = torch.randint(self.n_class, (size,), generator=g).sort().values
        z = self.centers[cls] + torch.randn(size, self.centers.shape[1], generator=g) * (0.2 + 0.15 * cls[:, None])
        image = z @ self.to_image + 0.3 * torch.randn(size, self.to_image.shape[1], generator=g)
        text = z @ self.to_text + 0.3 * torch.randn(size, self.to_text.shape[1], generator=g)
        return image, text
