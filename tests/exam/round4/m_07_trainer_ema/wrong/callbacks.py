import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from trainer import Callback


class Ema(Callback):
    """Averaged weights; evaluation runs on them."""

    def __init__(self, model, decay=0.9):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.kept = None

    @torch.no_grad()
    def on_step_end(self, tr):
        for n, p in tr.model.named_parameters():
            self.shadow[n].lerp_(p.detach(), 1 - self.decay)

    @torch.no_grad()
    def on_eval_begin(self, tr):
        self.kept = {n: p.detach().clone() for n, p in tr.model.named_parameters()}
        for n, p in tr.model.named_parameters():
            p.copy_(self.shadow[n])

    @torch.no_grad()
    def on_eval_end(self, tr):
        for n, p in tr.model.named_parameters():
            p.copy_(self.kept[n])
        self.kept = None


class Checkpoint(Callback):
    """Saves after an evaluation, so that the folder name can carry the score."""

    def __init__(self, out, ema):
        self.out, self.ema = out, ema

    def on_eval_end(self, tr):
        if not self.out:
            return
        msd, osd = get_state_dict(tr.model, tr.opt)
        name = f"{tr.step:05d}_eval{tr.metrics['eval']:.4f}"
        dcp.save({"model": msd, "optim": osd, "ema": self.ema.shadow, "step": tr.step},
                 checkpoint_id=os.path.join(self.out, name))

    def load(self, folder, tr):
        name = sorted(d for d in os.listdir(folder) if "_eval" in d)[-1]
        msd, osd = get_state_dict(tr.model, tr.opt)
        st = {"model": msd, "optim": osd, "ema": self.ema.shadow, "step": 0}
        dcp.load(st, checkpoint_id=os.path.join(folder, name))
        set_state_dict(tr.model, tr.opt, model_state_dict=st["model"], optim_state_dict=st["optim"])
        tr.step = st["step"]


class Log(Callback):
    def on_step_end(self, tr):
        if tr.rank == 0:
            print(f"step {tr.step:3d} train {tr.metrics['train']:.5f}", flush=True)

    def on_eval_end(self, tr):
        if tr.rank == 0:
            print(f"          eval {tr.metrics['eval']:.5f}", flush=True)
