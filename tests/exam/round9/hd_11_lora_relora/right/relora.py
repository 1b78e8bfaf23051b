"""ReLoRA: low-rank updates that are folded into the frozen weights every few steps, on sharded parameters."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor


class ReLoRALinear(nn.Module):
    def __init__(self, d_in, d_out, rank=4, alpha=8):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(d_out))
        self.A = nn.Parameter(torch.empty(rank, d_in))
        self.B = nn.Parameter(torch.zeros(d_out, rank))
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        nn.init.kaiming_uniform_(self.A, a=5**0.5)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(F.linear(x, self.A), self.B)


def rows_of(full, like):
    """The rows of a full tensor that this rank keeps of the parameter `like`."""
    if not isinstance(like, DTensor):
        return full
    size = -(-full.shape[0] // like.device_mesh.size())
    first = like.device_mesh.get_local_rank() * size
    return full[first:first + size]


@torch.no_grad()
def merge_and_restart(layers, opt, seed):
    """W += scale * B A on every rank's rows of W, then new A, zero B and fresh Adam moments of the two."""
    g = torch.Generator().manual_seed(seed)
    for layer in layers:
        # W and B are split by rows in the same way, so only A has to be complete
        a = layer.A.full_tensor()
        layer.weight.to_local().add_(layer.B.to_local() @ a, alpha=layer.scale)
        bound = 1 / a.shape[1] ** 0.5
        fresh = (torch.rand(a.shape, generator=g) * 2 - 1) * bound
        layer.A.to_local().copy_(rows_of(fresh, layer.A))
        layer.B.to_local().zero_()
        for p in (layer.A, layer.B):
            state = opt.state[p]
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()
            state["step"].zero_()
