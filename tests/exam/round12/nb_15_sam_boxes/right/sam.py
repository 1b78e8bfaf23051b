"""Sharpness-aware minimisation (Foret et al., 2021) for DTensor parameters."""
import torch
import torch.distributed as dist


class SAM:
    def __init__(self, model, base, rho=0.05):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.base, self.rho = base, rho
        self.home = None

    @torch.no_grad()
    def climb(self):
        """Moves the weights to the (first-order) worst point of the rho ball and drops the gradients."""
        square = torch.stack([p.grad.to_local().pow(2).sum() for p in self.params]).sum()
        dist.all_reduce(square)
        scale = self.rho / (square.sqrt() + 1e-12)
        self.home = [p.detach().clone() for p in self.params]
        for p in self.params:
            p.to_local().add_(p.grad.to_local() * scale)
            p.grad = None

    @torch.no_grad()
    def descend(self):
        """Back to the stored weights, then one step of the base optimizer with the gradient found above."""
        for p, h in zip(self.params, self.home):
            p.to_local().copy_(h.to_local())
        self.home = None
        self.base.step()
        self.base.zero_grad()
