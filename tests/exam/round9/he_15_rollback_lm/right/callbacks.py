import copy
import os

import torch
import torch.nn as nn

from framework import Callback, full


class SpikeGuard(Callback):
    """When the loss jumps, go back to the last good weights and moments and drop the batch."""

    def __init__(self, factor=1.5, keep_every=3):
        self.factor, self.keep_every = factor, keep_every
        self.smooth = None
        self.good = None
        self.rollbacks = 0

    def remember(self, tr):
        weights = [p.detach().clone() for p in tr.model.parameters()]
        self.good = {"weights": weights, "opt": copy.deepcopy(tr.opt.state_dict())}

    def after_backward(self, tr):
        if self.good is None:
            self.remember(tr)
        if self.smooth is not None and tr.loss > self.factor * self.smooth:
            with torch.no_grad():
                for p, w in zip(tr.model.parameters(), self.good["weights"]):
                    p.copy_(w)
            tr.opt.load_state_dict(copy.deepcopy(self.good["opt"]))
            tr.skip_update = True
            self.rollbacks += 1
            if tr.rank == 0:
                print(f"step {tr.step}: loss {tr.loss:.3f} against {self.smooth:.3f}, rolled back", flush=True)
        else:
            self.smooth = tr.loss if self.smooth is None else 0.7 * self.smooth + 0.3 * tr.loss

    def after_step(self, tr):
        if not tr.skip_update and tr.step % self.keep_every == 0:
            self.remember(tr)

    def state_dict(self):
        return {"smooth": self.smooth, "good": self.good, "rollbacks": self.rollbacks}

    def load_state_dict(self, state):
        self.__dict__.update(state)


class Clip(Callback):
    def __init__(self, limit):
        self.limit = limit

    def after_backward(self, tr):
        nn.utils.clip_grad_norm_(tr.model.parameters(), self.limit)


class TailAverage(Callback):
    """Mean of the weights of the last steps; this is what gets exported."""

    def __init__(self, begin, path):
        self.begin, self.path = begin, path
        self.count, self.mean = 0, None

    @torch.no_grad()
    def after_step(self, tr):
        if tr.step <= self.begin or tr.skip_update:
            return
        self.count += 1
        if self.mean is None:
            self.mean = {n: p.detach().clone() for n, p in tr.model.named_parameters()}
        else:
            for n, p in tr.model.named_parameters():
                self.mean[n].lerp_(p.detach(), 1 / self.count)

    def on_end(self, tr):
        if self.path:
            gathered = {n: full(v) for n, v in self.mean.items()}
            if tr.rank == 0:
                torch.save(gathered, self.path)

    def state_dict(self):
        return {"count": self.count, "mean": self.mean}

    def load_state_dict(self, state):
        self.count, self.mean = state["count"], state["mean"]


class Saver(Callback):
    def __init__(self, folder, every):
        self.folder, self.every = folder, every

    def after_step(self, tr):
        if self.every and tr.step % self.every == 0:
            os.makedirs(self.folder, exist_ok=True)
            torch.save(tr.state_dict(), os.path.join(self.folder, f"{tr.step:06d}.{tr.rank}-{tr.world}.ckpt"))

    @staticmethod
    def newest(folder, rank, world):
        return os.path.join(folder, max(f for f in os.listdir(folder) if f.endswith(f".{rank}-{world}.ckpt")))


class Log(Callback):
    def after_step(self, tr):
        if tr.rank == 0 and tr.step % 4 == 0:
            print(f"step {tr.step} loss {tr.loss:.4f}", flush=True)
