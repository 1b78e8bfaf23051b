import torch


class SAM:
    """Sharpness-aware minimisation around any optimizer (Foret et al., 2021).

    `closure` must compute the loss of one and the same batch and run backward.
    """

    def __init__(self, optimizer, rho):
        self.optimizer, self.rho = optimizer, rho
        self.params = [p for g in optimizer.param_groups for p in g["params"]]

    def step(self, closure):
        loss = closure()
        with torch.no_grad():
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.params])
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            before = [p.detach().clone() for p in self.params]
            for p in self.params:
                p.add_(p.grad * (self.rho / (norm.item() + 1e-12)))
        self.optimizer.zero_grad()
        closure()
        with torch.no_grad():
            for p, b in zip(self.params, before):
                p.copy_(b)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm
