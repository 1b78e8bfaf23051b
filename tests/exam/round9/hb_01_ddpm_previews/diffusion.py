import torch


class GaussianDiffusion:
    def __init__(self, timesteps=10):
        self.T = timesteps
        betas = torch.linspace(5e-3, 0.6, timesteps)
        self.alphas = 1.0 - betas
        self.abar = torch.cumprod(self.alphas, 0)

    def add_noise(self, x0, t, noise):
        a = self.abar[t].view(-1, 1, 1, 1)
        return a.sqrt() * x0 + (1 - a).sqrt() * noise

    @torch.no_grad()
    def sample(self, model, n, seed):
        """Ancestral sampling; the same seed always gives previews from the same noise."""
        gen = torch.Generator().manual_seed(seed)
        x = torch.randn(n, 1, 8, 8, generator=gen)
        for i in reversed(range(self.T)):
            t = torch.full((n,), i)
            eps = model(x, t)
            x = (x - (1 - self.alphas[i]) / (1 - self.abar[i]).sqrt() * eps) / self.alphas[i].sqrt()
            if i > 0:
                x = x + (1 - self.alphas[i]).sqrt() * torch.randn(x.shape, generator=gen)
        return x
