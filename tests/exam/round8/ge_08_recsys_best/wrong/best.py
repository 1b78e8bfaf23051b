import torch


class BestModel:
    """Keeps the shards of the model with the lowest validation loss."""

    def __init__(self, model):
        self.model = model
        self.loss = float("inf")
        self.epoch = 0
        self.shards = {name: p.to_local().detach().clone() for name, p in model.named_parameters()}

    def offer(self, loss, epoch):
        if loss < self.loss:
            self.loss, self.epoch = loss, epoch
            for name, p in self.model.named_parameters():
                self.shards[name].copy_(p.to_local().detach())

    @torch.no_grad()
    def restore(self):
        for name, p in self.model.named_parameters():
            p.to_local().copy_(self.shards[name])

    def state_dict(self):
        return {"loss": self.loss, "epoch": self.epoch, "shards": self.shards}

    def load_state_dict(self, state):
        self.loss, self.epoch = state["loss"], state["epoch"]
        for name, shard in state["shards"].items():
            self.shards[name].copy_(shard)
