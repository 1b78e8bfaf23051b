import torch


def gamma_of(sigma_rel):
    """exponent of the power function profile with the given relative width (bisection)"""
    lo, hi = 0.0, 1000.0
    for _ in range(200):
        g = 0.5 * (lo + hi)
        width = ((g + 1) / ((g + 2) ** 2 * (g + 3))) ** 0.5
        lo, hi = (g, hi) if width > sigma_rel else (lo, g)
    return lo


class PowerEMA:
    """Averages of the weights with power function profiles; kept as tensors of the same sharding as the weights."""

    @torch.no_grad()
    def __init__(self, model, widths=(0.05, 0.15)):
        self.gammas = [gamma_of(w) for w in widths]
        self.tracks = [{n: p.detach().clone() for n, p in model.named_parameters()} for _ in widths]

    @torch.no_grad()
    def update(self, model, step):
        for gamma, track in zip(self.gammas, self.tracks):
            beta = (1 - 1 / step) ** (gamma + 1)
            for n, p in model.named_parameters():
                track[n].lerp_(p.detach(), 1 - beta)

    def state_dict(self):
        return {f"track{i}": t for i, t in enumerate(self.tracks)}
