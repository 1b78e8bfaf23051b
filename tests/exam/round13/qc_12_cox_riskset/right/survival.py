"""Cox partial likelihood over a batch which lies on several ranks, and the concordance index."""
import torch
import torch.distributed as dist


def gather(values):
    """The values of all ranks in rank order, without gradient."""
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.detach().contiguous())
    return parts


def risk_sets(log_risk, time, event):
    """Negative log partial likelihood of the whole batch, as a function of this rank's log risks."""
    rank = dist.get_rank()
    others = gather(log_risk)
    others[rank] = log_risk
    everyone, time, event = torch.cat(others), torch.cat(gather(time)), torch.cat(gather(event))
    order = time.argsort(descending=True, stable=True)
    everyone, event = everyone[order], event[order]
    at_risk = everyone.logcumsumexp(0)
    return ((at_risk - everyone) * event).sum() / event.sum().clamp_min(1)


def concordance(log_risk, time, event):
    risk, time, event = (torch.cat(gather(t)) for t in (log_risk, time, event))
    earlier = (time[:, None] < time[None]) & (event[:, None] > 0)
    good = (risk[:, None] > risk[None]).double() + 0.5 * (risk[:, None] == risk[None]).double()
    return (good[earlier].sum() / earlier.sum()).item()
