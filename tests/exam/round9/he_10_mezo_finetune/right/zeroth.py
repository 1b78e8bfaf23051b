"""Zeroth-order training (MeZO): two forward passes along a seeded random direction, no backward."""
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


class ZerothOrder:
    def __init__(self, model, lr, eps=1e-2, momentum=0.5):
        self.model, self.lr, self.eps, self.momentum = model, lr, eps, momentum
        self.velocity = {n: torch.zeros_like(self._shard(p)) for n, p in model.named_parameters()}

    @staticmethod
    def _shard(p):
        p = p.detach()
        return p.to_local() if isinstance(p, DTensor) else p

    def _direction(self, seed):
        """The same full-size direction on all ranks; every rank keeps the rows of its shard."""
        g = torch.Generator().manual_seed(seed)
        for name, p in self.model.named_parameters():
            z = torch.randn(p.shape, generator=g)
            if isinstance(p, DTensor):
                mesh = p.device_mesh
                parts = torch.chunk(z, mesh.size(), dim=0)
                me = mesh.get_local_rank()
                z = parts[me] if me < len(parts) else z[:0]
            yield name, self._shard(p), z

    @torch.no_grad()
    def _loss(self, loss_fn):
        loss = loss_fn(self.model)
        dist.all_reduce(loss)
        return loss.item() / dist.get_world_size()

    @torch.no_grad()
    def step(self, loss_fn, seed):
        origin = {n: self._shard(p).clone() for n, p in self.model.named_parameters()}
        for _, w, z in self._direction(seed):
            w.add_(z, alpha=self.eps)
        plus = self._loss(loss_fn)
        for name, w, z in self._direction(seed):
            w.copy_(origin[name]).sub_(z, alpha=self.eps)
        minus = self._loss(loss_fn)
        slope = (plus - minus) / (2 * self.eps)
        for name, w, z in self._direction(seed):
            self.velocity[name].mul_(self.momentum).add_(z, alpha=slope)
            w.copy_(origin[name]).sub_(self.velocity[name], alpha=self.lr)
        return 0.5 * (plus + minus)
