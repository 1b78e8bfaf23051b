import torch
import torch.distributed as dist


def gae(rewards, values, last, gamma=0.95, lam=0.9):
    out, run = [], torch.zeros_like(last)
    nxt = last
    for r, v in zip(reversed(rewards), reversed(values)):
        run = (r + gamma * nxt - v) + gamma * lam * run
        out.append(run)
        nxt = v
    return torch.stack(out[::-1])


def normalise(adv):
    """Mean and deviation over the samples of all ranks."""
    s = torch.stack([adv.sum(), adv.square().sum(), torch.tensor(float(adv.numel()))]).double()
    dist.all_reduce(s)
    mean = s[0] / s[2]
    var = s[1] / s[2] - mean**2
    return ((adv - mean) / (var.sqrt() + 1e-6)).float()
