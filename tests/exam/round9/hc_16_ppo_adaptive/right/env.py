import torch

OBS, ACT = 5, 2


class Drift:
    """A batch of point masses that must be held at the origin in a wind; one noise row per environment and step."""

    def __init__(self, state):
        self.state = state

    def observe(self):
        pos, vel = self.state[:, :2], self.state[:, 2:]
        return torch.cat([5 * pos, vel, pos.norm(dim=1, keepdim=True) * 20 + 3], 1)

    def step(self, action, noise):
        pos, vel = self.state[:, :2], self.state[:, 2:]
        vel = 0.85 * vel + 0.2 * action.clamp(-2, 2) + 0.05 * noise + 0.02
        pos = pos + 0.3 * vel
        out = pos.norm(dim=1) > 3
        reward = 1 - pos.square().sum(1) - 2 * out.float()
        self.state = torch.where(out[:, None], 0.3 * torch.cat([noise, noise.flip(1)], 1), torch.cat([pos, vel], 1))
        return reward, out.float()
