import torch
import torch.distributed as dist


class Metric:
    """Accumulates locally; compute() gives the value over all ranks so far."""

    def __init__(self, size):
        self.state = torch.zeros(size, dtype=torch.float64)

    def reset(self):
        self.state.zero_()

    def synced(self):
        dist.all_reduce(self.state)
        return self.state


class Accuracy(Metric):
    def __init__(self):
        super().__init__(2)

    def update(self, logits, target):
        self.state += torch.tensor([(logits.argmax(-1) == target).sum(), len(target)], dtype=torch.float64)

    def compute(self):
        hits, count = self.synced().tolist()
        return hits / max(count, 1)


class MeanLoss(Metric):
    def __init__(self):
        super().__init__(2)

    def update(self, losses):
        self.state += torch.tensor([losses.sum(), losses.numel()], dtype=torch.float64)

    def compute(self):
        total, count = self.synced().tolist()
        return total / max(count, 1)
