import torch


class ShardedEMA:
    """Moving average of the weights, kept shard by shard next to the model."""

    def __init__(self, model, decay=0.98, dtype=torch.bfloat16):
        self.decay = decay
        self.shadow = {n: p.detach().to(dtype, copy=True) for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for n, p in model.named_parameters():
            s = self.shadow[n]
            s.lerp_(p.detach().to(s.dtype), 1 - self.decay)

    @torch.no_grad()
    def swap(self, model):
        """Exchanges the weights of the model and the average (call twice to undo)."""
        for n, p in model.named_parameters():
            kept = p.detach().clone()
            p.copy_(self.shadow[n])
            self.shadow[n] = kept.to(self.shadow[n].dtype)

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, shadow):
        self.shadow = shadow
