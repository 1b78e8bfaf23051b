import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor


def orthogonalize(m, rounds=5):
    """Newton-Schulz towards U V^T of a momentum matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = m.shape[0] > m.shape[1]
    x = (m.T if tall else m).double()
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        g = x @ x.T
        x = a * x + (b * g + c * g @ g) @ x
    return (x.T if tall else x).to(m.dtype)


class OwnerMuon(torch.optim.Optimizer):
    """Muon in which each matrix has one owner rank.

    The momentum of a matrix lives, whole, on its owner only. Gradients are gathered, the owner orthogonalizes and
    broadcasts the update, every rank keeps its own rows of it.
    """

    def __init__(self, params, mesh, lr=0.02, momentum=0.9):
        super().__init__(list(params), dict(lr=lr, momentum=momentum))
        self.group, self.rank, self.world = mesh.get_group(), mesh.get_local_rank(), mesh.size()
        flat = [p for g in self.param_groups for p in g["params"]]
        order = sorted(range(len(flat)), key=lambda i: -flat[i].numel())
        self.owner = {flat[i]: n % self.world for n, i in enumerate(order)}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.full_tensor()
                owner = self.owner[p]
                update = torch.empty_like(grad)
                if owner == self.rank:
                    buf = self.state[p].setdefault("buf", torch.zeros_like(grad))
                    buf.mul_(group["momentum"]).add_(grad)
                    update.copy_(orthogonalize(grad + group["momentum"] * buf))
                    update.mul_(max(1.0, p.shape[0] / p.shape[1]) ** 0.5)
                dist.broadcast(update, group_src=owner, group=self.group)
                if isinstance(p, DTensor):
                    update = distribute_tensor(update, p.device_mesh, p.placements, src_data_rank=None)
                p.add_(update, alpha=-group["lr"])

    def owned(self, names):
        """Momentum matrices which this rank owns, by parameter name."""
        return {names[p]: s["buf"] for p, s in self.state.items() if "buf" in s}

    def adopt(self, names, buffers):
        for p in self.owner:
            if self.owner[p] == self.rank and names[p] in buffers:
                self.state[p]["buf"] = buffers[names[p]].clone()
