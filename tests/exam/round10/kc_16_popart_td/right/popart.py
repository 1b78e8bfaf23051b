import torch
import torch.distributed as dist
from torch import nn


class PopArtHead(nn.Module):
    """One value per task in normalised units.  When the statistics of the targets move, the rows of the
    head are rewritten so that the unnormalised predictions stay as they were."""

    def __init__(self, width, tasks, beta=0.1):
        super().__init__()
        self.linear = nn.Linear(width, tasks)
        self.beta = beta
        self.register_buffer("mean", torch.zeros(tasks))
        self.register_buffer("second", torch.ones(tasks))

    def forward(self, h):
        return self.linear(h)

    @property
    def std(self):
        return (self.second - self.mean**2).clamp(min=1e-4).sqrt()

    def normalise(self, values, task):
        return (values - self.mean[task]) / self.std[task]

    def denormalise(self, out):
        return out * self.std + self.mean

    @torch.no_grad()
    def observe(self, targets, task):
        """targets of this rank's transitions; the moments are those of the batch of all ranks."""
        tasks = self.mean.numel()
        sums = torch.zeros(3, tasks, dtype=torch.float64)
        sums[0].index_add_(0, task, targets.double())
        sums[1].index_add_(0, task, targets.double() ** 2)
        sums[2].index_add_(0, task, torch.ones_like(targets, dtype=torch.float64))
        dist.all_reduce(sums)
        seen = sums[2] > 0
        count = sums[2].clamp(min=1)
        old_mean, old_std = self.mean.clone(), self.std
        rate = self.beta * seen.float()
        self.mean += rate * ((sums[0] / count).float() - self.mean)
        self.second += rate * ((sums[1] / count).float() - self.second)
        self._preserve(old_mean, old_std)

    def _preserve(self, old_mean, old_std):
        """Each rank owns some rows (tasks) of the head, possibly none."""
        weight, bias = self.linear.weight.to_local(), self.linear.bias.to_local()
        per_rank = -(-self.mean.numel() // dist.get_world_size())
        first = min(dist.get_rank() * per_rank, self.mean.numel())
        rows = slice(first, first + weight.shape[0])
        ratio = old_std[rows] / self.std[rows]
        weight.mul_(ratio.unsqueeze(1))
        bias.mul_(ratio).add_((old_mean[rows] - self.mean[rows]) / self.std[rows])
