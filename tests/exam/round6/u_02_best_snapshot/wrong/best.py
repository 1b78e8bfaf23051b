import torch


class BestKeeper:
    """Remembers the weights with the lowest validation loss (each rank its own shards)."""

    def __init__(self, model):
        self.model = model
        self.value = float("inf")
        self.step = 0
        self.shards = {}
        self.remember()

    def remember(self):
        self.shards = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def offer(self, value, step):
        if value < self.value:
            self.value, self.step = value, step
            self.remember()

    @torch.no_grad()
    def restore(self):
        for n, p in self.model.named_parameters():
            p.copy_(self.shards[n])

    def state_dict(self):
        return {"value": self.value, "step": self.step,
                "shards": {n: s.to_local() for n, s in self.shards.items()}}

    def load_state_dict(self, state):
        self.value, self.step = state["value"], state["step"]
        for n, s in self.shards.items():
            s.to_local().copy_(state["shards"][n])
