"""Logged transitions of a noisy pendulum-like system."""
import torch


def transition_log(size, seed):
    gen = torch.Generator().manual_seed(seed)
    angle = (torch.rand(size, generator=gen) * 2 - 1) * 3.14159
    speed = torch.randn(size, generator=gen)
    action = torch.randint(0, 3, (size,), generator=gen)
    push = (action.float() - 1.0) * 2.0
    new_speed = 0.95 * speed + 0.15 * torch.sin(angle) * 5.0 + 0.15 * push
    new_speed = new_speed + 0.02 * torch.randn(size, generator=gen)
    new_angle = angle + 0.15 * new_speed
    reward = torch.cos(new_angle) - 0.05 * new_speed.abs()

    def obs(a, s):
        return torch.stack([torch.cos(a), torch.sin(a), s], dim=1)

    return obs(angle, speed), action, reward, obs(new_angle, new_speed)
