import torch


class TrackingEnvs:
    """A point follows a moving target with three actions; every environment has its own generator."""

    def __init__(self, ids, seed):
        self.gens = [torch.Generator().manual_seed(seed * 10_007 + i) for i in ids]
        self.point = torch.zeros(len(ids))
        self.target = torch.stack([torch.randn((), generator=g) for g in self.gens])

    def observe(self):
        return torch.stack([self.point, self.target, (self.target - self.point).abs()], dim=1)

    def uniforms(self):
        return torch.stack([torch.rand((), generator=g) for g in self.gens])

    def step(self, action):
        kick = torch.stack([torch.randn((), generator=g) for g in self.gens])
        self.point = self.point + (action.float() - 1.0) * 0.4
        self.target = 0.95 * self.target + 0.3 * kick
        # raw rewards are on an awkward scale on purpose, the trainer rescales them
        return -40.0 * (self.target - self.point).abs()

    def state_dict(self):
        return {"point": self.point, "target": self.target, "gens": [g.get_state() for g in self.gens]}

    def load_state_dict(self, s):
        self.point, self.target = s["point"], s["target"]
        for g, v in zip(self.gens, s["gens"]):
            g.set_state(v)
