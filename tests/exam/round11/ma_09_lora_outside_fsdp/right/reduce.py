import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class BucketReducer:
    """Sums the gradients of replicated parameters over the ranks in one flat message."""

    def __init__(self, params):
        self.params = list(params)

    def add_up(self, extra):
        """`extra` is a small tensor of counters which travels in the same message."""
        grads = [p.grad for p in self.params]
        flat = _flatten_dense_tensors(grads + [extra])
        dist.all_reduce(flat)
        *summed, extra = _unflatten_dense_tensors(flat, grads + [extra])
        for p, g in zip(self.params, summed):
            p.grad.copy_(g)
        return extra

    def scale(self, factor):
        torch._foreach_mul_([p.grad for p in self.params], factor)
