import torch


class NoiseSchedule:
    def __init__(self, steps=1000):
        s = 0.008
        u = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
        bar = torch.cos((u + s) / (1 + s) * torch.pi / 2) ** 2
        self.bar = (bar / bar[0]).clamp(1e-5, 1.0).float()[1:]
        self.steps = steps

    def add_noise(self, x, eps, t):
        a = self.bar[t][:, None, None, None]
        return a.sqrt() * x + (1 - a).sqrt() * eps
