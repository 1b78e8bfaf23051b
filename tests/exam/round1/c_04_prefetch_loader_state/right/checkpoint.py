from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class TrainState(Stateful):
    def __init__(self, model, opt, loader, sched):
        self.model, self.opt, self.loader, self.sched = model, opt, loader, sched
        self.step = 0

    def state_dict(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {
            "model": model,
            "opt": opt,
            "loader": self.loader.state_dict(),
            "sched": self.sched.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.loader.load_state_dict(sd["loader"])
        self.sched.load_state_dict(sd["sched"])
        self.step = sd["step"]


def save(folder, state):
    dcp.save({"app": state}, checkpoint_id=str(Path(folder) / f"{state.step:05d}"))


def load_newest(folder, state):
    newest = max(p for p in Path(folder).iterdir() if p.is_dir() and p.name.isdigit())
    dcp.load({"app": state}, checkpoint_id=str(newest))
