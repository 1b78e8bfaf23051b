import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class Warmup:
    def __init__(self, opt, progress, lr, steps):
        self.opt, self.progress, self.lr, self.steps = opt, progress, lr, steps

    def on_begin(self, _):
        for g in self.opt.param_groups:
            g["lr"] = self.lr * min(1.0, (self.progress.step + 1) / self.steps)


class AdaptiveClip:
    """Clips to twice the running mean of the gradient norms; the mean is a part of the checkpoint."""

    def __init__(self, model):
        self.model, self.mean = model, torch.zeros(())

    def on_gradients(self, _):
        limit = 2 * self.mean.item() if self.mean > 0 else 1.0
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit).full_tensor()
        self.mean = 0.9 * self.mean + 0.1 * norm if self.mean > 0 else norm.clone()


class WeightAverage:
    def __init__(self, model, decay=0.9):
        self.model, self.decay = model, decay
        self.average = {n: p.detach().clone() for n, p in model.named_parameters()}

    def on_end(self, _):
        with torch.no_grad():
            for n, p in self.model.named_parameters():
                self.average[n].lerp_(p.detach(), 1 - self.decay)


class Printer:
    def __init__(self, progress, every=4):
        self.progress, self.every = progress, every

    def on_end(self, loss):
        mean = loss.clone()
        dist.all_reduce(mean)
        self.progress.history.append(mean.item() / dist.get_world_size())
        if self.progress.step % self.every == 0 and dist.get_rank() == 0:
            recent = self.progress.history[-self.every:]
            print(f"step {self.progress.step} loss {sum(recent) / len(recent):.4f}", flush=True)


class Whole(Stateful):
    """All that makes up the run, as one thing that DCP can save and load."""

    def __init__(self, model, opt, progress, clip, average):
        self.model, self.opt, self.progress, self.clip, self.average = model, opt, progress, clip, average

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "average": self.average.average, "clip": self.clip.mean,
                "step": self.progress.step, "tokens": self.progress.tokens, "history": list(self.progress.history)}

    def load_state_dict(self, s):
        set_state_dict(self.model, self.opt, model_state_dict=s["model"], optim_state_dict=s["opt"])
        self.average.average = s["average"]
        self.clip.mean = s["clip"].clone()
        self.progress.step, self.progress.tokens = s["step"], s["tokens"]
        self.progress.history[:] = s["history"]


class Saver:
    def __init__(self, whole, folder, every):
        self.whole, self.folder, self.every = whole, folder, every

    def on_end(self, _):
        step = self.whole.progress.step
        if self.folder and self.every and step % self.every == 0:
            dcp.save({"run": self.whole}, checkpoint_id=os.path.join(self.folder, f"run_{step:06d}"))


def restore(whole, folder):
    newest = sorted(d for d in os.listdir(folder) if d.startswith("run_"))[-1]
    # the history has another length in the checkpoint than in a fresh run
    whole.progress.history[:] = [0.0] * int(newest[4:])
    dcp.load({"run": whole}, checkpoint_id=os.path.join(folder, newest))
