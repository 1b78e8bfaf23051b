import torch
import torch.distributed as dist


class LossSampler:
    """Draws samples in proportion to their last known loss. The table is the same on all ranks."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.table = torch.ones(cfg.samples)
        self.rng = torch.Generator().manual_seed(cfg.seed)

    def draw(self, step):
        """Indices of the global batch, and weights that undo the bias of the draw."""
        if step < self.cfg.warmup:
            probs = torch.full((self.cfg.samples,), 1.0 / self.cfg.samples)
        else:
            probs = self.table ** self.cfg.temperature
            probs = 0.8 * probs / probs.sum() + 0.2 / self.cfg.samples
        picked = torch.multinomial(probs, self.cfg.batch, replacement=False, generator=self.rng)
        weights = (1.0 / (self.cfg.samples * probs[picked])) ** 0.5
        return picked, weights / weights.mean()

    def update(self, picked, losses):
        parts = [torch.empty_like(losses) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, losses)
        self.table[picked] = self.cfg.smooth * self.table[picked] + (1 - self.cfg.smooth) * torch.cat(parts)

    def state_dict(self):
        return {"table": self.table, "rng": self.rng.get_state()}

    def load_state_dict(self, state):
        self.table.copy_(state["table"])
        self.rng.set_state(state["rng"])
