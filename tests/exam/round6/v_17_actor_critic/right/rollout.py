import torch


class Pendulums:
    """A batch of simple swing-up toys; the noise of episode e is made from the number e."""

    def __init__(self, count, horizon=12):
        self.count, self.horizon = count, horizon

    def play(self, policy, iteration, mine):
        g = torch.Generator().manual_seed(600 + iteration)
        angle = (torch.rand(self.count, generator=g) * 6.28 - 3.14)[mine]
        speed = (torch.randn(self.count, generator=g) * 0.5)[mine]
        obs, acts, rewards, logps = [], [], [], []
        for t in range(self.horizon):
            u = torch.rand(self.count, generator=g)[mine]
            o = self.observe(angle, speed, t)
            logits = policy(o)
            edge = logits.softmax(-1).cumsum(-1)
            a = (u[:, None] > edge).sum(-1).clamp(max=2)
            speed = 0.95 * speed + 0.3 * (a - 1) - 0.1 * angle.sin()
            angle = angle + 0.3 * speed
            obs.append(o)
            acts.append(a)
            logps.append(logits.log_softmax(-1).gather(-1, a[:, None]).squeeze(-1))
            rewards.append(-angle.abs().clamp(max=3) - 0.05 * speed.abs())
        last = self.observe(angle, speed, self.horizon)
        return (torch.stack(x, 1) for x in (obs, acts, rewards, logps)), last

    def observe(self, angle, speed, t):
        left = torch.full_like(angle, 1 - t / self.horizon)
        return torch.stack([angle.sin(), angle.cos(), speed, angle / 3, left], -1)


def gae(rewards, values, last_value, gamma=0.95, lam=0.9):
    adv, running, nxt = torch.zeros_like(rewards), 0.0, last_value
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * nxt - values[:, t]
        running = delta + gamma * lam * running
        adv[:, t] = running
        nxt = values[:, t]
    return adv, adv + values
