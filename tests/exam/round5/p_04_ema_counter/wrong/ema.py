import torch


class Ema:
    """Shadow weights with the usual warm-up of the decay: min(decay, (1 + n) / (10 + n))."""

    def __init__(self, model, decay=0.999):
        self.decay = decay
        self.updates = 0
        self.shadow = {k: v.detach().clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        d = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for k, v in model.state_dict().items():
            self.shadow[k].lerp_(v, 1 - d)

    @torch.no_grad()
    def swap(self, model):
        for k, v in model.state_dict().items():
            tmp = v.clone()
            v.copy_(self.shadow[k])
            self.shadow[k].copy_(tmp)
