"""A point that must be steered to the origin; every environment has its own generator, which is part of the state."""

import torch

OBS, ACTIONS = 4, 5
MOVES = torch.tensor([[0.0, 0.0], [0.3, 0.0], [-0.3, 0.0], [0.0, 0.3], [0.0, -0.3]])


class PointEnv:
    def __init__(self, index):
        self.gen = torch.Generator().manual_seed(31337 + index)
        self.reset()

    def reset(self):
        self.pos = torch.randn(2, generator=self.gen)
        self.wind = 0.1 * torch.randn(2, generator=self.gen)
        self.clock = 0

    def observe(self):
        return torch.cat([self.pos, self.wind * 5])

    def gumbel(self):
        return -(-torch.rand(ACTIONS, generator=self.gen).clamp_min(1e-9).log()).log()

    def step(self, action):
        before = self.pos.norm()
        self.pos = self.pos + MOVES[action] + self.wind
        self.clock += 1
        reward = before - self.pos.norm()
        done = self.clock >= 12
        if done:
            self.reset()
        return reward, done

    def state_dict(self):
        return {"gen": self.gen.get_state(), "pos": self.pos, "wind": self.wind, "clock": self.clock}

    def load_state_dict(self, s):
        self.gen.set_state(s["gen"])
        self.pos, self.wind, self.clock = s["pos"], s["wind"], s["clock"]


class Fleet:
    """This rank's environments; env i lives on rank i % world."""

    def __init__(self, total, rank, world):
        self.ids = list(range(rank, total, world))
        self.envs = [PointEnv(i) for i in self.ids]

    def collect(self, agent, length):
        keys = ("obs", "action", "logp", "value", "reward", "done")
        log = {k: [] for k in keys}
        for _ in range(length):
            obs = torch.stack([e.observe() for e in self.envs])
            action, logp, value = agent.act(obs, torch.stack([e.gumbel() for e in self.envs]))
            out = [e.step(a) for e, a in zip(self.envs, action)]
            reward = torch.stack([r for r, _ in out])
            done = torch.tensor([float(d) for _, d in out])
            for k, v in zip(keys, (obs, action, logp, value, reward, done)):
                log[k].append(v)
        batch = {k: torch.stack(v) for k, v in log.items()}  # [T, E, ...]
        batch["last"] = agent.value(torch.stack([e.observe() for e in self.envs]))
        return batch
