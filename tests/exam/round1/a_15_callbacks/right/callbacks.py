import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F


class Callback:
    def on_start(self, t): ...
    def before_step(self, t): ...
    def after_step(self, t): ...
    def on_end(self, t): ...
    def state_dict(self):
        return {}

    def load_state_dict(self, sd): ...


class CosineLR(Callback):
    def __init__(self, peak, warmup, total):
        self.peak, self.warmup, self.total = peak, warmup, total

    def before_step(self, t):
        s = t.step
        f = (
            (s + 1) / self.warmup
            if s < self.warmup
            else 0.5 + 0.5 * math.cos(math.pi * (s - self.warmup) / (self.total - self.warmup))
        )
        for group in t.opt.param_groups:
            group["lr"] = self.peak * f


class EMA(Callback):
    def __init__(self, model, decay):
        self.decay = decay
        self.avg = [p.detach().clone() for p in model.parameters()]
        self.names = [n for n, _ in model.named_parameters()]

    @torch.no_grad()
    def after_step(self, t):
        d = min(self.decay, (1 + t.step) / (10 + t.step))
        for a, p in zip(self.avg, t.model.parameters()):
            a.mul_(d).add_(p, alpha=1 - d)

    @torch.no_grad()
    def swap(self, model):
        """Exchanges averaged and raw weights; calling it twice restores everything."""
        for a, p in zip(self.avg, model.parameters()):
            tmp = p.detach().clone()
            p.copy_(a)
            a.copy_(tmp)

    def state_dict(self):
        return dict(zip(self.names, self.avg))

    def load_state_dict(self, sd):
        for n, a in zip(self.names, self.avg):
            a.copy_(sd[n])


class Evaluate(Callback):
    def __init__(self, data, every, ema):
        self.x, self.y = data
        self.every, self.ema = every, ema
        self.history = []

    @torch.no_grad()
    def nll(self, t):
        # 101 rows do not divide over the ranks: sum and count are pooled. Every rank makes exactly one forward.
        x, y = self.x[t.rank :: t.world], self.y[t.rank :: t.world]
        total = F.cross_entropy(t.model(x).flatten(0, 1), y.flatten(), reduction="sum")
        pooled = torch.stack([total, (y != -100).sum().float()]).double()
        dist.all_reduce(pooled)
        t.model.reshard()
        return (pooled[0] / pooled[1]).item()

    def after_step(self, t):
        if t.step % self.every == 0:
            raw = self.nll(t)
            self.ema.swap(t.model)
            smooth = self.nll(t)
            self.ema.swap(t.model)
            self.history.append((t.step, raw, smooth))
            t.log(f"  val loss {raw:.4f}, of the average {smooth:.4f}")


class Checkpoint(Callback):
    """Must be the last callback, so that it sees what the others did in this step."""

    def __init__(self, out, every):
        self.out, self.every = out, every

    def after_step(self, t):
        if not self.every or t.step % self.every:
            return
        dcp.save(t.state_dict(), checkpoint_id=os.path.join(self.out, f"step_{t.step:06d}"))

    @staticmethod
    def resume(t, folder):
        names = [d for d in os.listdir(folder) if os.path.exists(os.path.join(folder, d, ".metadata"))]
        state = t.state_dict()
        dcp.load(state, checkpoint_id=os.path.join(folder, max(names)))
        t.load_state_dict(state)
        t.log(f"resumed at step {t.step}")
