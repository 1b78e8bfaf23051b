import torch
from torch.distributed.tensor import DTensor


def shard_of(t):
    return t.to_local() if isinstance(t, DTensor) else t


class BestKeeper:
    """Keeps the shards of the best weights so far in host memory; writes them back at the end of training."""

    def __init__(self, model):
        self.params = dict(model.named_parameters())
        self.value, self.step = float("inf"), -1
        self.weights = self._collect()

    def _collect(self):
        return {n: shard_of(p.detach()).to("cpu") for n, p in self.params.items()}

    def offer(self, value, step):
        if value < self.value:
            self.value, self.step = value, step
            self.weights = self._collect()
            return True
        return False

    @torch.no_grad()
    def put_back(self):
        for n, p in self.params.items():
            shard_of(p).copy_(self.weights[n])

    def state_dict(self):
        return {"value": self.value, "step": self.step, "weights": self.weights}

    def load_state_dict(self, state):
        self.value, self.step = state["value"], state["step"]
        self.weights = {n: w.clone() for n, w in state["weights"].items()}
