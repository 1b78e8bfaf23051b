"""Elastic weight consolidation: keep the weights that mattered for the earlier task near their old values."""
import torch
from torch.distributed.tensor import DTensor


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class EWC:
    def __init__(self, model, strength):
        self.params = dict(model.named_parameters())
        self.strength = strength
        self.active = False
        self.anchor = {n: p.detach().clone() for n, p in self.params.items()}
        self.fisher = {n: torch.zeros_like(p) for n, p in self.params.items()}

    @torch.no_grad()
    def accumulate(self, n_batches):
        for n, p in self.params.items():
            self.fisher[n].add_(p.grad.square() / n_batches)

    @torch.no_grad()
    def consolidate(self):
        for n, p in self.params.items():
            self.anchor[n].copy_(p)
        self.active = True

    @torch.no_grad()
    def add_gradient(self):
        """The penalty is elementwise, so its gradient is added to the shards directly."""
        if not self.active:
            return
        for n, p in self.params.items():
            pull = local(self.fisher[n]) * (local(p) - local(self.anchor[n]))
            local(p.grad).add_(pull, alpha=self.strength)

    def state_dict(self):
        return {"fisher": self.fisher, "anchor": self.anchor, "active": torch.tensor(self.active)}

    def load_state_dict(self, state):
        for n in self.params:
            self.fisher[n] = state["fisher"][n]
            self.anchor[n] = state["anchor"][n]
        self.active = bool(state["active"])
