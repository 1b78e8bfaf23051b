"""Antithetic evolution strategy on the shards of a policy."""
import torch
import torch.distributed as dist


class Evolution:
    def __init__(self, model, pairs, sigma, seed):
        self.model, self.pairs, self.sigma, self.seed = model, pairs, sigma, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.shapes = [tuple(p.shape) for p in model.parameters()]

    def shards(self):
        return [p.to_local() for p in self.model.parameters()]

    def noise(self, generation, pair):
        """The direction is drawn for the whole parameter; each rank keeps the rows it owns."""
        g = torch.Generator().manual_seed(self.seed + 1000 * generation + pair)
        return [torch.randn(shape, generator=g).chunk(self.world)[self.rank] for shape in self.shapes]

    @torch.no_grad()
    def fitness(self, score):
        value = score().double().sum()
        dist.all_reduce(value)
        return value

    @torch.no_grad()
    def generation(self, generation, score, count):
        """Fill ``.grad`` of every parameter with the search gradient; returns the mean fitness."""
        centre = [w.clone() for w in self.shards()]
        ascent = [torch.zeros_like(w) for w in centre]
        seen = []
        for pair in range(self.pairs):
            eps = self.noise(generation, pair)
            both = []
            for sign in (1, -1):
                for w, c, e in zip(self.shards(), centre, eps):
                    w.copy_(c + sign * self.sigma * e)
                both.append(self.fitness(score) / count)
            seen += both
            weight = (both[0] - both[1]) / (2 * self.sigma * self.pairs)
            for a, e in zip(ascent, eps):
                a.add_(e * weight.float())
        for w, c in zip(self.shards(), centre):
            w.copy_(c)
        for p, a in zip(self.model.parameters(), ascent):
            p.grad = torch.zeros_like(p)
            p.grad.to_local().copy_(-a)
        return torch.stack(seen).mean().item()
