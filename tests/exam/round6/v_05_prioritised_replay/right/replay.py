import torch
import torch.distributed as dist


class PrioritisedReplay:
    """Replay memory with proportional prioritisation. Every rank holds the whole memory and draws the
    same global batch; it then works on its own slice of it."""

    def __init__(self, capacity, obs_dim, alpha=0.7, seed=0):
        self.obs = torch.zeros(capacity, obs_dim)
        self.action = torch.zeros(capacity, dtype=torch.long)
        self.reward = torch.zeros(capacity)
        self.next_obs = torch.zeros(capacity, obs_dim)
        self.done = torch.zeros(capacity)
        self.priority = torch.zeros(capacity)
        self.alpha = alpha
        self.fill = torch.zeros((), dtype=torch.long)
        self.generator = torch.Generator().manual_seed(seed)

    def add(self, obs, action, reward, next_obs, done):
        n, at = len(obs), int(self.fill) % len(self.obs)
        where = torch.arange(at, at + n) % len(self.obs)
        self.obs[where], self.action[where], self.reward[where] = obs, action, reward
        self.next_obs[where], self.done[where] = next_obs, done
        self.priority[where] = self.priority.max().clamp(min=1.0)
        self.fill += n

    def draw(self, size, beta):
        size_now = min(int(self.fill), len(self.obs))
        p = self.priority[:size_now].pow(self.alpha)
        p = p / p.sum()
        idx = torch.multinomial(p, size, generator=self.generator)
        weight = (size_now * p[idx]).pow(-beta)
        return idx, weight / weight.max()

    def update(self, idx, td_error):
        """Takes the slice of indices and errors of this rank."""
        new = td_error.abs() + 1e-3
        all_idx = [torch.empty_like(idx) for _ in range(dist.get_world_size())]
        all_new = [torch.empty_like(new) for _ in range(dist.get_world_size())]
        dist.all_gather(all_idx, idx.contiguous())
        dist.all_gather(all_new, new.contiguous())
        self.priority[torch.cat(all_idx)] = torch.cat(all_new)

    def state(self):
        out = {k: v for k, v in vars(self).items() if torch.is_tensor(v)}
        return {**out, "generator": self.generator.get_state()}

    def load(self, state):
        self.generator.set_state(state["generator"])
        for key, value in state.items():
            if key != "generator":
                getattr(self, key).copy_(value)
