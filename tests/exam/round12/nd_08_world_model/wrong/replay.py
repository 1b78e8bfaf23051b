import torch


class Replay:
    """Short sequences of a noisy oscillator network; minibatches are drawn with the global generator."""

    def __init__(self, count=600, length=6, dim=8, act=2, seed=51):
        g = torch.Generator().manual_seed(seed)
        a = torch.linalg.qr(torch.randn(dim, dim, generator=g))[0] * 0.97
        b = 0.6 * torch.randn(act, dim, generator=g)
        u = torch.randn(count, length, act, generator=g)
        s = [torch.randn(count, dim, generator=g)]
        for t in range(length - 1):
            s.append(torch.tanh(s[-1] @ a + u[:, t] @ b) + 0.05 * torch.randn(count, dim, generator=g))
        obs = torch.stack(s, 1)
        self.train, self.test = (obs[:500], u[:500]), (obs[500:], u[500:])

    def sample(self, size):
        idx = torch.randint(len(self.train[0]), (size,))
        return self.train[0][idx], self.train[1][idx]
