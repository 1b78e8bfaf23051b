"""Antithetic evolution strategies on sharded weights.

The noise of a member is a function of (seed, generation, member, parameter), so no rank has to store or send it: each
rank draws the whole tensor and keeps the slice which belongs to its shard.
"""
import torch
from torch.distributed.tensor import distribute_tensor


class EvolutionStrategy:
    def __init__(self, model, pairs, sigma, lr, momentum, seed):
        self.params = list(model.parameters())
        self.pairs, self.sigma, self.lr, self.momentum, self.seed = pairs, sigma, lr, momentum, seed
        self.generation = 0
        self.velocity = [torch.zeros_like(p.to_local()) for p in self.params]
        self.baseline = None        # moving mean of the fitness

    def _noise(self, member, index):
        p = self.params[index]
        g = torch.Generator().manual_seed(
            ((self.seed * 1009 + self.generation) * 1009 + member) * 1009 + index)
        eps = torch.randn(p.shape, generator=g)
        return distribute_tensor(eps, p.device_mesh, p.placements, src_data_rank=None).to_local()

    @torch.no_grad()
    def generation_step(self, fitness):
        """fitness() is the global loss of the current weights, the same number on all ranks."""
        keep = [p.to_local().clone() for p in self.params]
        scores = torch.zeros(self.pairs, 2, dtype=torch.float64)
        for m in range(self.pairs):
            for side, sign in enumerate((1.0, -1.0)):
                for i, p in enumerate(self.params):
                    p.to_local().copy_(keep[i] + sign * self.sigma * self._noise(m, i))
                scores[m, side] = fitness()
        for p, w in zip(self.params, keep):
            p.to_local().copy_(w)
        gap = (scores[:, 0] - scores[:, 1]) / (scores.std() + 1e-12)
        for i, p in enumerate(self.params):
            direction = torch.zeros_like(self.velocity[i])
            for m in range(self.pairs):
                direction.add_(self._noise(m, i), alpha=gap[m].item() / (2 * self.pairs))
            self.velocity[i].mul_(self.momentum).add_(direction)
            p.to_local().sub_(self.lr * self.velocity[i])
        mean = scores.mean().item()
        self.baseline = mean if self.baseline is None else 0.8 * self.baseline + 0.2 * mean
        self.generation += 1
        return mean

    def state_dict(self):
        return {"generation": self.generation, "velocity": self.velocity, "baseline": self.baseline}

    def load_state_dict(self, s):
        self.generation, self.velocity, self.baseline = s["generation"], s["velocity"], s["baseline"]
