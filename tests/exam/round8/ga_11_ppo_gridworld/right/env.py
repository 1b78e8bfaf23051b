import torch


class Walk:
    """Vectorised walk on a line of 9 cells to a goal that differs per environment. Each environment has a global number."""

    def __init__(self, horizon=10, cells=9):
        self.horizon, self.cells = horizon, cells

    def observe(self, pos, goal):
        eye = torch.eye(self.cells)
        return torch.cat([eye[pos], eye[goal]], -1)

    def rollout(self, actor, seed, envs, lo, hi):
        """Play environments lo..hi of `envs`; the random numbers are those of all environments, whoever plays them."""
        g = torch.Generator().manual_seed(seed)
        pos = torch.randint(self.cells, (envs,), generator=g)[lo:hi]
        goal = torch.randint(self.cells, (envs,), generator=g)[lo:hi]
        obs, act, rew, logp = [], [], [], []
        for _ in range(self.horizon):
            o = self.observe(pos, goal)
            lp = actor(o)
            u = torch.rand(envs, 3, generator=g)[lo:hi]
            a = (lp - (-u.clamp_min(1e-9).log()).log()).argmax(-1)
            pos = (pos + a - 1).clamp(0, self.cells - 1)
            obs.append(o), act.append(a), logp.append(lp.gather(1, a[:, None])[:, 0])
            rew.append(1.0 - (pos - goal).abs().float() / 4)
        return torch.stack(obs), torch.stack(act), torch.stack(rew), torch.stack(logp)
