import torch
import torch.distributed as dist


class RunningMeanStd:
    """Chan's parallel update of mean and variance of the observations seen so far."""

    def __init__(self, dim):
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self.var = torch.ones(dim, dtype=torch.float64)
        self.count = torch.tensor(1e-4, dtype=torch.float64)

    def update(self, x):
        x = x.double()
        s = torch.cat([x.sum(0), x.pow(2).sum(0), torch.tensor([float(x.shape[0])], dtype=torch.float64)])
        dist.all_reduce(s)
        d = x.shape[1]
        n = s[-1]
        mean = s[:d] / n
        var = s[d:2 * d] / n - mean ** 2
        delta = mean - self.mean
        total = self.count + n
        m2 = self.var * self.count + var * n + delta ** 2 * self.count * n / total
        self.mean = self.mean + delta * n / total
        self.var = m2 / total
        self.count = total

    def __call__(self, x):
        return ((x.double() - self.mean) / (self.var + 1e-8).sqrt()).float().clamp(-10, 10)

    def state_dict(self):
        return {"mean": self.mean, "var": self.var, "count": self.count}

    def load_state_dict(self, sd):
        self.mean, self.var, self.count = sd["mean"], sd["var"], sd["count"]
