import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Callback:
    def on_step_end(self, trainer): ...
    def on_eval_begin(self, trainer): ...
    def on_eval_end(self, trainer, loss): ...


class WeightAverage(Callback):
    """Keeps an exponential average and evaluates with it."""

    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.avg = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def on_step_end(self, trainer):
        for n, p in trainer.model.named_parameters():
            self.avg[n].lerp_(p.detach(), 1 - self.decay)

    @torch.no_grad()
    def swap(self, model):
        for n, p in model.named_parameters():
            live = p.detach().clone()
            p.copy_(self.avg[n])
            self.avg[n].copy_(live)

    def on_eval_begin(self, trainer):
        self.swap(trainer.model)

    def on_eval_end(self, trainer, loss):
        self.swap(trainer.model)


class Printer(Callback):
    def on_eval_end(self, trainer, loss):
        if dist.get_rank() == 0:
            print(f"step {trainer.step} train {trainer.last_loss:.4f} val(ema) {loss:.4f}", flush=True)


class Saver(Callback):
    """Writes a checkpoint after every evaluation."""

    def __init__(self, out, average):
        self.out, self.average = out, average

    def on_eval_end(self, trainer, loss):
        trainer.best = min(trainer.best, loss)
        m, o = get_state_dict(trainer.model, trainer.opt)
        state = {"model": m, "optim": o, "ema": self.average.avg, "step": trainer.step, "best": trainer.best}
        dcp.save(state, checkpoint_id=os.path.join(self.out, f"ck{trainer.step:04d}"))


def load_newest(root, trainer, average):
    newest = sorted(d for d in os.listdir(root) if d.startswith("ck"))[-1]
    m, o = get_state_dict(trainer.model, trainer.opt)
    state = {"model": m, "optim": o, "ema": average.avg, "step": 0, "best": 0.0}
    dcp.load(state, checkpoint_id=os.path.join(root, newest))
    set_state_dict(trainer.model, trainer.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    trainer.step, trainer.best = state["step"], state["best"]
