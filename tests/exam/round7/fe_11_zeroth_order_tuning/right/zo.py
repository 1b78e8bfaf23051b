"""Zeroth-order (SPSA / MeZO) optimizer for sharded models: no backward, two forwards a step."""
import hashlib

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


class MeZO:
    def __init__(self, model, lr, eps, probes=4, momentum=0.9):
        self.model, self.lr, self.eps, self.probes, self.momentum = model, lr, eps, probes, momentum
        self.named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.velocity = {n: torch.zeros_like(p) for n, p in self.named}
        self.step_count = 0

    def direction(self, name, param, probe):
        """The same full direction on every rank, cut to the shard; never stored."""
        key = f"{self.step_count}/{probe}/{name}".encode()
        seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "big")
        full = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed))
        if isinstance(param, DTensor):
            full = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
        return full

    @torch.no_grad()
    def shift(self, probe, amount):
        for name, param in self.named:
            param.add_(self.direction(name, param, probe), alpha=amount)

    @torch.no_grad()
    def step(self, closure):
        """closure() returns the loss of the global batch, the same number on every rank."""
        start = {n: p.detach().clone() for n, p in self.named}
        slopes, losses = [], []
        for probe in range(self.probes):
            self.shift(probe, self.eps)
            plus = closure()
            self.shift(probe, -2 * self.eps)
            minus = closure()
            for name, param in self.named:
                param.copy_(start[name])
            slopes.append(((plus - minus) / (2 * self.eps)).item())
            losses.append(((plus + minus) / 2).item())
        for name, param in self.named:
            velocity = self.velocity[name].mul_(self.momentum)
            for probe, slope in enumerate(slopes):
                velocity.add_(self.direction(name, param, probe), alpha=slope / self.probes)
            param.sub_(velocity, alpha=self.lr)
        self.step_count += 1
        return sum(losses) / len(losses)

    def state_dict(self):
        return {"velocity": self.velocity, "step_count": self.step_count}
