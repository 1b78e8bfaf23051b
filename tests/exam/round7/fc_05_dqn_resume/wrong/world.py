import torch


class ChainWorld:
    """A batch of walkers on a noisy ring with a rewarded cell; observation is a soft one-hot of the position."""

    def __init__(self, n, cells=12, seed=5):
        self.n, self.cells = n, cells
        self.gen = torch.Generator().manual_seed(seed)
        self.pos = torch.randint(0, cells, (n,), generator=self.gen)

    def obs(self):
        d = (torch.arange(self.cells) - self.pos.unsqueeze(1)).abs()
        d = torch.minimum(d, self.cells - d)
        return torch.exp(-d.float())

    def explore(self, greedy, eps):
        rnd = torch.randint(0, 3, (self.n,), generator=self.gen)
        take = torch.rand(self.n, generator=self.gen) < eps
        return torch.where(take, rnd, greedy)

    def step(self, a):
        slip = torch.rand(self.n, generator=self.gen) < 0.1
        move = torch.where(slip, torch.zeros_like(a), a - 1)
        self.pos = (self.pos + move) % self.cells
        reward = (self.pos == 7).float() - 0.05
        done = (self.pos == 7).float()
        fresh = torch.randint(0, self.cells, (self.n,), generator=self.gen)
        obs2 = self.obs()
        self.pos = torch.where(done.bool(), fresh, self.pos)
        return obs2, reward, done

    def state_dict(self):
        return {"pos": self.pos, "rng": self.gen.get_state()}

    def load_state_dict(self, d):
        self.pos = d["pos"]
        self.gen.set_state(d["rng"])
