import torch


class Corridors:
    """A batch of little continuous worlds: move left or right or stay; reward near the goal."""

    def __init__(self, n, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.pos = torch.rand(n, generator=self.g) * 2 - 1
        self.goal = torch.rand(n, generator=self.g) * 2 - 1
        self.t = torch.zeros(n)

    def obs(self):
        return torch.stack([self.pos, self.goal, self.goal - self.pos, self.t / 10], 1)

    def step(self, action):
        before = self.obs()
        self.pos = (self.pos + 0.2 * (action - 1)).clamp(-1.5, 1.5)
        gap = (self.goal - self.pos).abs()
        reward = torch.where(gap < 0.1, 2.0, 1.0 - gap)
        self.t += 1
        done = (self.t >= 10) | (gap < 0.1)
        after = self.obs()
        n = len(self.pos)
        fresh = torch.rand(2, n, generator=self.g) * 2 - 1
        self.pos = torch.where(done, fresh[0], self.pos)
        self.goal = torch.where(done, fresh[1], self.goal)
        self.t = torch.where(done, torch.zeros(n), self.t)
        return before, action, reward, after, done.float()

    def state(self):
        return {"pos": self.pos, "goal": self.goal, "t": self.t, "g": self.g.get_state()}

    def load(self, s):
        self.pos, self.goal, self.t = s["pos"], s["goal"], s["t"]
        self.g.set_state(s["g"])
