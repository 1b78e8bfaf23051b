import torch
import torch.distributed as dist


class GroupDRO:
    """Worst-group training: exponentiated-gradient weights over the groups' losses in the global batch."""

    def __init__(self, groups, rate):
        self.q = torch.full((groups,), 1.0 / groups, dtype=torch.float64)
        self.rate = rate

    def __call__(self, losses, group):
        n = len(self.q)
        sums = torch.zeros(2 * n, dtype=torch.float64)
        sums[:n].index_add_(0, group, losses.detach().double())
        sums[n:].index_add_(0, group, torch.ones(len(group), dtype=torch.float64))
        dist.all_reduce(sums)
        total, count = sums[:n], sums[n:]
        mean = total / count.clamp(min=1)
        self.q = self.q * torch.exp(self.rate * mean)
        self.q /= self.q.sum()
        weight = (self.q / count.clamp(min=1)).float()
        return (weight[group] * losses).sum(), mean, count
