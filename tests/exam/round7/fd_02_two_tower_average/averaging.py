"""Exponential average of sharded parameters; the served model is the average."""
import torch


class ShardedEMA:
    def __init__(self, model, decay=0.99):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            s = self.shadow[n]
            s.add_((p.detach() - s) * (1.0 - self.decay))

    @torch.no_grad()
    def swap(self, model):
        """Exchange weights and averages (call again to undo)."""
        for n, p in model.named_parameters():
            tmp = p.detach().clone()
            p.copy_(self.shadow[n])
            self.shadow[n].copy_(tmp)

    def state_dict(self):
        return self.shadow
