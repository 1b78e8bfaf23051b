import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Callback:
    def on_start(self, run): ...
    def on_loss(self, run, loss): return loss
    def on_grads(self, run): ...
    def on_step(self, run): ...
    def on_end(self, run): ...


class Accumulate(Callback):
    """Several micro-steps per optimizer step; only the last one communicates."""

    def __init__(self, every):
        self.every = every

    def on_start(self, run):
        run.micro_per_step = self.every

    def on_loss(self, run, loss):
        run.model.set_requires_gradient_sync(run.micro == self.every - 1)
        return loss / self.every


class WarmupLinear(Callback):
    """Sets the rate from the step number, hence there is no state to save."""

    def __init__(self, peak, warmup):
        self.peak, self.warmup = peak, warmup

    def on_grads(self, run):
        up = min(1.0, (run.step + 1) / self.warmup)
        down = 1 - run.step / run.total
        for g in run.opt.param_groups:
            g["lr"] = self.peak * min(up, down)


class ClipGrad(Callback):
    def __init__(self, limit):
        self.limit = limit

    def on_grads(self, run):
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), self.limit)


class Meter(Callback):
    def __init__(self, every):
        self.every, self.sum, self.n = every, torch.zeros(1), 0

    def on_loss(self, run, loss):
        self.sum += loss.detach()
        self.n += 1
        return loss

    def on_step(self, run):
        if run.step % self.every == 0:
            dist.all_reduce(self.sum)
            if run.rank == 0:
                print(f"step {run.step} loss {self.sum.item() / self.n / run.world:.4f}", flush=True)
            self.sum, self.n = torch.zeros(1), 0


class Checkpoint(Callback):
    def __init__(self, save_to, every, load_from):
        self.save_to, self.every, self.load_from = save_to, every, load_from

    def _state(self, run):
        model, opt = get_state_dict(run.model, run.opt)
        return {"model": model, "opt": opt, "step": run.step}

    def on_start(self, run):
        if not self.load_from:
            return
        names = sorted(n for n in os.listdir(self.load_from) if os.path.exists(os.path.join(self.load_from, n, ".metadata")))
        if names:
            sd = self._state(run)
            dcp.load(sd, checkpoint_id=os.path.join(self.load_from, names[-1]))
            set_state_dict(run.model, run.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
            run.step = sd["step"]

    def on_step(self, run):
        if self.every and run.step % self.every == 0:
            dcp.save(self._state(run), checkpoint_id=os.path.join(self.save_to, f"s{run.step:06d}"))


class FinalIoU(Callback):
    def __init__(self, images, masks):
        self.images, self.masks = images, masks

    @torch.no_grad()
    def on_end(self, run):
        pred = run.model(self.images[run.rank::run.world]).argmax(1)
        true = self.masks[run.rank::run.world]
        table = torch.zeros(3, 2)
        for c in range(3):
            table[c, 0] = ((pred == c) & (true == c)).sum()
            table[c, 1] = ((pred == c) | (true == c)).sum()
        dist.all_reduce(table)
        if run.rank == 0:
            print(f"mean IoU {(table[:, 0] / table[:, 1].clamp(min=1)).mean():.3f}")
