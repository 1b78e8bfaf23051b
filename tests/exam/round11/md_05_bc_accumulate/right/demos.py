"""Demonstrations of a two-joint reaching task, and the micro-batches made of them."""
import torch


def make_demos(count=176, seed=21):
    g = torch.Generator().manual_seed(seed)
    q = torch.rand(count, 2, generator=g) * 3 - 1.5
    goal = torch.rand(count, 2, generator=g) * 3 - 1.5
    vel = 0.3 * torch.randn(count, 2, generator=g)
    torque = 2.0 * torch.sin(goal - q) - 0.7 * vel + 0.1 * torch.cos(q.flip(1))
    return torch.cat([q, vel, goal], 1), torque.clamp(-1.5, 1.5)


def windows(count, micro, accum, epoch, seed=4):
    """Yields the windows of one epoch: lists of up to `accum` global micro-batches of row numbers."""
    g = torch.Generator().manual_seed(seed * 10_000 + epoch)
    micros = torch.randperm(count, generator=g).split(micro)
    for i in range(0, len(micros), accum):
        yield micros[i:i + accum]
