import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class MeZO:
    """Zeroth-order SGD with momentum (Malladi et al., 2023): forward passes only, noise is redrawn from seeds.

    The noise of a parameter is drawn for its full shape on every rank, and a rank keeps the rows of its shard, so
    the direction does not depend on the number of ranks.
    """

    def __init__(self, model, lr, eps=1e-2, directions=4, momentum=0.8):
        self.names = [n for n, _ in model.named_parameters()]
        self.model = model
        self.lr, self.eps, self.directions, self.momentum = lr, eps, directions, momentum
        self.buf = {n: torch.zeros_like(self._local(p)) for n, p in model.named_parameters()}

    @staticmethod
    def _local(p):
        return p.to_local() if isinstance(p, DTensor) else p.detach()

    def _noise(self, seed):
        g = torch.Generator().manual_seed(seed)
        for n, p in self.model.named_parameters():
            z = torch.randn(p.shape, generator=g)
            if isinstance(p, DTensor):
                parts = z.chunk(p.device_mesh.size())
                rank = p.device_mesh.get_local_rank()
                z = parts[rank] if rank < len(parts) else z[:0]
            yield n, self._local(p), z

    @torch.no_grad()
    def step(self, loss_fn, seed):
        base = {n: self._local(p).clone() for n, p in self.model.named_parameters()}
        grad = {n: torch.zeros_like(b) for n, b in base.items()}
        center = 0.0
        for d in range(self.directions):
            s = seed * self.directions + d
            value = []
            for sign in (1.0, -1.0):
                for n, p, z in self._noise(s):
                    p.copy_(base[n] + sign * self.eps * z)
                value.append(self._global(loss_fn()))
            slope = (value[0] - value[1]) / (2 * self.eps)
            for n, p, z in self._noise(s):
                grad[n].add_(z, alpha=slope / self.directions)
            center += sum(value) / 2 / self.directions
        for n, p in self.model.named_parameters():
            self.buf[n].mul_(self.momentum).add_(grad[n])
            self._local(p).copy_(base[n] - self.lr * self.buf[n])
        return center

    @staticmethod
    def _global(loss):
        total = loss.detach().double()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()
