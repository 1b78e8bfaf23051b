import torch


class ModelEma:
    """Exponential moving average held in a second, equally sharded model."""

    def __init__(self, model, ema_model, decay):
        self.model = model
        self.module = ema_model
        self.decay = decay
        self.updates = 0
        for p in self.module.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for pe, p in zip(self.module.parameters(), self.model.parameters()):
            pe.lerp_(p.detach(), 1 - decay)
        for be, b in zip(self.module.buffers(), self.model.buffers()):
            be.copy_(b)
