"""Zeroth-order fine-tuning (MeZO): two forward passes with a random direction that is never stored, only its seed."""
import torch
import torch.distributed as dist


class MeZO:
    def __init__(self, model, lr, eps, weight_decay=0.0):
        self.model, self.lr, self.eps, self.weight_decay = model, lr, eps, weight_decay
        self.history = []  # (seed, projected gradient, lr) of every update: enough to replay the run

    def _shards(self, seed):
        """Pairs of a local shard and the same part of the direction; the direction is drawn for the whole tensor."""
        gen = torch.Generator().manual_seed(seed)
        for p in self.model.parameters():
            z = torch.randn(p.shape, generator=gen)
            if hasattr(p, "to_local"):
                local = p.to_local()
                parts = z.chunk(dist.get_world_size(), dim=0)
                z = parts[dist.get_rank()] if dist.get_rank() < len(parts) else z[:0]
                yield local, z
            else:
                yield p, z

    @torch.no_grad()
    def move(self, seed, amount, decay=0.0):
        for shard, z in self._shards(seed):
            shard.mul_(1.0 - decay).add_(z, alpha=amount)

    @torch.no_grad()
    def step(self, loss_fn, seed, lr_scale=1.0):
        self.move(seed, self.eps)
        plus = loss_fn()
        self.move(seed, -2 * self.eps)
        minus = loss_fn()
        self.move(seed, self.eps)
        slope = (plus - minus) / (2 * self.eps)
        lr = self.lr * lr_scale
        self.move(seed, -lr * slope, decay=lr * self.weight_decay)
        self.history.append((seed, slope, lr))
        return 0.5 * (plus + minus)

    def replay(self, history):
        """Applies recorded updates to the initial weights. The small shifts are repeated as well, for equal rounding."""
        for seed, slope, lr in history:
            for amount in (self.eps, -2 * self.eps, self.eps):
                self.move(seed, amount)
            self.move(seed, -lr * slope, decay=lr * self.weight_decay)
            self.history.append((seed, slope, lr))
