import torch


class AdapterEMA:
    """Moving average of the trainable parameters; the frozen base needs none."""

    def __init__(self, model, decay):
        self.decay = decay
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.shadow = {n: p.detach().clone() for n, p in self.params.items()}

    @torch.no_grad()
    def update(self):
        for n, p in self.params.items():
            self.shadow[n].mul_(self.decay).add_(p.detach().to(self.shadow[n].dtype), alpha=1 - self.decay)

    @torch.no_grad()
    def swap(self):
        """Exchanges the weights of the model with the averages. Call again to go back."""
        for n, p in self.params.items():
            live = p.detach().clone()
            p.copy_(self.shadow[n])
            self.shadow[n] = live
