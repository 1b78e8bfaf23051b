import torch


class PairedViews:
    """Synthetic image/caption pairs that share a latent code."""

    def __init__(self, n=512, latent=8, img_dim=48, txt_dim=24, seed=7):
        g = torch.Generator().manual_seed(seed)
        z = torch.randn(n, latent, generator=g)
        a = torch.randn(latent, img_dim, generator=g)
        b = torch.randn(latent, txt_dim, generator=g)
        self.img = torch.tanh(z @ a) + 0.1 * torch.randn(n, img_dim, generator=g)
        self.txt = torch.tanh(z @ b) + 0.1 * torch.randn(n, txt_dim, generator=g)

    def __len__(self):
        return len(self.img)

    def global_batch(self, step, size, seed):
        per_epoch = len(self) // size
        epoch, pos = divmod(step, per_epoch)
        g = torch.Generator().manual_seed(seed * 1000 + epoch)
        return torch.randperm(len(self), generator=g)[pos * size : (pos + 1) * size]
