"""A vector of small grid worlds. Every world has its own random stream, so it does not matter which rank plays it."""
import torch

SIZE = 6


class Grid:
    def __init__(self, number):
        self.g = torch.Generator().manual_seed(9000 + number)
        self.reset()

    def reset(self):
        self.me = torch.randint(SIZE, (2,), generator=self.g)
        self.goal = torch.randint(SIZE, (2,), generator=self.g)
        self.age = 0

    def observe(self):
        return torch.cat([self.me, self.goal, self.goal - self.me]).float() / SIZE

    def choose(self, q, epsilon):
        if torch.rand(1, generator=self.g) < epsilon:
            return int(torch.randint(4, (1,), generator=self.g))
        return int(q.argmax())

    def act(self, action):
        move = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])[action]
        before = (self.goal - self.me).abs().sum()
        self.me = (self.me + move).clamp(0, SIZE - 1)
        after = (self.goal - self.me).abs().sum()
        self.age += 1
        reached = bool(after == 0)
        reward = 1.0 if reached else 0.1 * float(before - after) - 0.02
        seen = self.observe()
        if reached or self.age >= 20:
            self.reset()
        return seen, reward, reached

    def state_dict(self):
        return {"g": self.g.get_state(), "me": self.me, "goal": self.goal, "age": self.age}

    def load_state_dict(self, s):
        self.g.set_state(s["g"])
        self.me, self.goal, self.age = s["me"], s["goal"], s["age"]
