"""Optimizer that lives in the gradient hooks: a parameter is updated as soon as its gradient is reduced."""
import torch


class InlineAdam:
    def __init__(self, model, lr_of, betas=(0.9, 0.98), eps=1e-8):
        self.lr_of, self.betas, self.eps = lr_of, betas, eps
        self.tick = 0
        self.slots = {}
        self.names = {}
        for name, p in model.named_parameters():
            local = p.detach().to_local()
            self.names[id(p)] = name
            self.slots[name] = {"m": torch.zeros_like(local), "v": torch.zeros_like(local)}
            p.register_post_accumulate_grad_hook(self._apply)

    def begin(self):
        """Called once before each backward pass."""
        self.tick += 1

    @torch.no_grad()
    def _apply(self, p):
        slot = self.slots[self.names[id(p)]]
        grad, weight = p.grad.to_local(), p.detach().to_local()
        b1, b2 = self.betas
        slot["m"].lerp_(grad, 1 - b1)
        slot["v"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
        m = slot["m"] / (1 - b1 ** self.tick)
        v = slot["v"] / (1 - b2 ** self.tick)
        weight.add_(m / (v.sqrt() + self.eps), alpha=-self.lr_of(self.tick))
        p.grad = None

    def state_dict(self):
        return {"tick": self.tick, "slots": self.slots}

    def load_state_dict(self, state):
        self.tick = state["tick"]
        for name, slot in state["slots"].items():
            for key, value in slot.items():
                self.slots[name][key].copy_(value)
