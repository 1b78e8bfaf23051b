"""Sampled softmax over the items of the whole global batch, with the logQ correction of popular negatives."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def gather_rows(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    parts[dist.get_rank()] = x  # our own rows stay in the graph
    return torch.cat(parts)


class Popularity:
    """Running estimate of how often every item turns up as an in-batch negative."""

    def __init__(self, items, decay=0.98):
        self.freq = torch.full((items,), 1.0 / items)
        self.decay = decay

    def update(self, items):
        count = torch.bincount(items, minlength=len(self.freq)).float()
        self.freq.mul_(self.decay).add_(count / count.sum(), alpha=1 - self.decay)

    def log_q(self, items):
        return self.freq[items].clamp(min=1e-6).log()


def sampled_softmax(u, v, items, pop, temperature=0.1):
    logits = u @ v.T / temperature - pop.log_q(items)
    same = items[:, None] == items[None, :]
    same.fill_diagonal_(False)
    return F.cross_entropy(logits.masked_fill(same, -1e9), torch.arange(len(u)))
