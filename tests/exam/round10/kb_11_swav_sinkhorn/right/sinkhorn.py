import torch
import torch.distributed as dist


@torch.no_grad()
def sinkhorn_assign(scores, epsilon=0.1, iterations=3):
    """Balanced soft assignment of the whole batch to the prototypes; rows are spread over the ranks.

    scores: (local samples, prototypes). Returns the codes of the local samples.
    """
    q = scores.double() / epsilon
    top = q.max()
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    q = torch.exp(q - top)
    samples = torch.tensor(float(q.shape[0]), dtype=torch.float64)
    dist.all_reduce(samples)
    total = q.sum()
    dist.all_reduce(total)
    q /= total
    for _ in range(iterations):
        per_proto = q.sum(0)
        dist.all_reduce(per_proto)
        q /= per_proto * q.shape[1]
        q /= q.sum(1, keepdim=True) * samples
    return (q * samples).float()
