import torch
import torch.distributed as dist
import torch.nn.functional as F


class BestWeights:
    """Keeps the sharded weights of the epoch with the lowest validation loss in memory."""

    def __init__(self, model):
        self.model = model
        self.value = float("inf")
        self.epoch = -1
        self.shards = {}

    @torch.no_grad()
    def update(self, value, epoch):
        if value < self.value:
            self.value, self.epoch = value, epoch
            self.shards = {n: p.to_local().clone() for n, p in self.model.named_parameters()}

    @torch.no_grad()
    def restore(self):
        for n, p in self.model.named_parameters():
            p.to_local().copy_(self.shards[n])

    def state_dict(self):
        return {"value": self.value, "epoch": self.epoch, "shards": self.shards}

    def load_state_dict(self, state):
        self.value, self.epoch, self.shards = state["value"], state["epoch"], state["shards"]


class Validation:
    def __init__(self, model, images, labels, batch=16):
        self.model, self.batch = model, batch
        rank, world = dist.get_rank(), dist.get_world_size()
        self.images, self.labels = images.chunk(world)[rank], labels.chunk(world)[rank]

    @torch.no_grad()
    def run(self):
        """Mean cross entropy and accuracy on the validation set."""
        self.model.eval()
        loss = torch.zeros((), dtype=torch.float64)
        correct = torch.zeros((), dtype=torch.float64)
        for x, y in zip(self.images.split(self.batch), self.labels.split(self.batch)):
            logits = self.model(x)
            loss += F.cross_entropy(logits, y, reduction="sum")
            correct += (logits.argmax(-1) == y).sum()
        stats = torch.stack([loss, correct, torch.tensor(float(len(self.labels)), dtype=torch.float64)])
        self.model.train()
        return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()
