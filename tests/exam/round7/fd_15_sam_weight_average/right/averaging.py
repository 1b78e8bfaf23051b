"""Mean of the weights at the end of every learning-rate cycle."""
import torch


class CycleAverage:
    def __init__(self, model):
        self.model = model
        self.mean = {n: torch.zeros_like(p.detach()) for n, p in model.named_parameters()}
        self.n = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def add(self):
        self.n += 1
        for n, p in self.model.named_parameters():
            self.mean[n] += (p.detach() - self.mean[n]) / self.n.item()

    def state_dict(self):
        return {"mean": self.mean, "n": self.n}

    @torch.no_grad()
    def apply(self):
        for n, p in self.model.named_parameters():
            p.copy_(self.mean[n])
