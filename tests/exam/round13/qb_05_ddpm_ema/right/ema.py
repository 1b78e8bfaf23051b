import torch


class EMA:
    def __init__(self, model, decay, dtype=torch.float32):
        self.decay = decay
        self.shadow = {n: p.detach().clone().to(dtype) for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            s = self.shadow[n]
            s.add_(p.detach().to(s.dtype) - s, alpha=1 - self.decay)

    @torch.no_grad()
    def exchange(self, model):
        """Swap the averaged weights with those of the model; call twice."""
        kept = {n: p.detach().clone() for n, p in model.named_parameters()}
        for n, p in model.named_parameters():
            p.copy_(self.shadow[n])
        return kept

    @torch.no_grad()
    def restore(self, model, kept):
        for n, p in model.named_parameters():
            p.copy_(kept[n])

    def full(self):
        return {n: s.full_tensor().float() for n, s in self.shadow.items()}
