import torch


class ASAM:
    """Adaptive sharpness-aware minimisation around any base optimizer.

    first_step moves the weights to the worst point of an ellipse around them, second_step moves them back and lets the
    base optimizer use the gradient taken there. The norm is that of the whole model, so it is a DTensor reduction.
    """

    def __init__(self, params, base, rho, eta=0.01):
        self.params, self.base, self.rho, self.eta = list(params), base, rho, eta
        self.saved = None

    @torch.no_grad()
    def first_step(self):
        stretch = [p.abs() + self.eta for p in self.params]
        norms = [(s * p.grad).norm() for s, p in zip(stretch, self.params)]
        norms = torch.stack([n.full_tensor() for n in norms])
        scale = (self.rho / (norms.norm() + 1e-12)).item()
        self.saved = [p.detach().clone() for p in self.params]
        for p, s in zip(self.params, stretch):
            p.add_(s.square_().mul_(p.grad).mul_(scale))
        self.base.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p, old in zip(self.params, self.saved):
            p.copy_(old)
        self.saved = None
        self.base.step()
        self.base.zero_grad()
