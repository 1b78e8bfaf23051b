import torch
import torch.distributed as dist


def global_moments(values):
    """Mean and standard deviation over the values of all ranks, in float64."""
    v = values.double()
    sums = torch.stack([v.sum(), (v * v).sum(), torch.tensor(float(v.numel()), dtype=torch.float64)])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    return mean, (sums[1] / sums[2] - mean * mean).clamp(min=0).sqrt(), sums[2]


class RunningScale:
    """Running standard deviation of the returns (Chan's parallel update), the same on every rank."""

    def __init__(self):
        self.mean, self.m2, self.count = 0.0, 0.0, 1e-4

    def update(self, values):
        mean, std, n = (t.item() for t in global_moments(values))
        delta, total = mean - self.mean, self.count + n
        self.mean += delta * n / total
        self.m2 += std * std * n + delta * delta * self.count * n / total
        self.count = total

    @property
    def std(self):
        return max((self.m2 / self.count) ** 0.5, 1e-3)
