"""Vectorised point-mass walker over random terrain; pure functions of the episode numbers."""
import torch


def rollout(policy, episodes, horizon=8):
    slope, pos, vel = [], [], []
    for e in episodes.tolist():
        g = torch.Generator().manual_seed(90_000 + e)
        slope.append(torch.randn(2, generator=g) * 0.3)
        pos.append(torch.randn(2, generator=g))
        vel.append(torch.randn(2, generator=g) * 0.2)
    slope, pos, vel = torch.stack(slope), torch.stack(pos), torch.stack(vel)
    ret = torch.zeros(len(episodes))
    for _ in range(horizon):
        force = policy(torch.cat([pos, vel, slope], 1)).tanh()
        vel = 0.8 * vel + 0.3 * force - 0.1 * slope * torch.cos(pos)
        pos = pos + 0.5 * vel
        ret = ret - pos.pow(2).sum(1) - 0.05 * force.pow(2).sum(1)
    return ret / horizon
