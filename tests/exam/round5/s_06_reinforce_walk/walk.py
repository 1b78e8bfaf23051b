"""Many small corridors: reach the goal cell; observations are noisy."""
import torch

CELLS, OBS, HORIZON = 7, 8, 10


class VecWalk:
    def __init__(self, n, seed, first=0):
        self.n = n
        self.gens = [torch.Generator().manual_seed(seed * 100_003 + first + i) for i in range(n)]

    def draw(self, fn):
        return torch.stack([fn(g) for g in self.gens])

    def reset(self):
        self.pos = self.draw(lambda g: torch.randint(0, CELLS, (), generator=g))
        self.goal = self.draw(lambda g: torch.randint(0, CELLS, (), generator=g))
        return self.observe()

    def observe(self):
        gap = (self.goal - self.pos).float() / CELLS
        noise = self.draw(lambda g: torch.randn(OBS - 2, generator=g))
        return torch.cat([gap[:, None], self.pos[:, None].float() / CELLS, 0.3 * noise], dim=1)

    def choose(self, logits):
        u = self.draw(lambda g: torch.rand((), generator=g))
        return (logits.softmax(-1).cumsum(-1) < u[:, None]).sum(-1).clamp(max=logits.size(-1) - 1)

    def step(self, action):
        self.pos = (self.pos + action - 1).clamp(0, CELLS - 1)
        reward = (self.pos == self.goal).float() - 0.05 * (action != 1).float()
        return self.observe(), reward
