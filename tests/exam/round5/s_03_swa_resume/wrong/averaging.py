"""Equal-weight average of the iterates (SWA) of a sharded model."""
import torch


class IterateAverage:
    def __init__(self, model, begin, every):
        self.begin, self.every = begin, every
        self.count = 0
        self.avg = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model, step):
        if step < self.begin or step % self.every:
            return
        for n, p in model.named_parameters():
            self.avg[n].add_(p.detach() - self.avg[n], alpha=1.0 / (self.count + 1))
        self.count += 1

    def state_dict(self):
        return {"avg": self.avg}

    def load_state_dict(self, sd):
        self.avg = sd["avg"]
