import torch
import torch.distributed as dist

from model import sequence_logp


class ReferenceLogps:
    """Log-probabilities of all pairs under the initial policy, computed once before training."""

    def __init__(self, n):
        self.table = torch.zeros(2, n)

    @torch.no_grad()
    def precompute(self, model, loader):
        for number in range(len(loader)):
            batch = loader.batch(0, number)
            self.table[0, batch["row"]] = sequence_logp(model, batch["chosen"], batch["chosen_mask"])
            self.table[1, batch["row"]] = sequence_logp(model, batch["rejected"], batch["rejected_mask"])
        dist.all_reduce(self.table)

    def lookup(self, batch):
        return self.table[0, batch["row"]], self.table[1, batch["row"]]
