from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class TrainState(Stateful):
    def __init__(self, model, opt, sched, swa):
        self.model, self.opt, self.sched, self.swa = model, opt, sched, swa
        self.step = 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "sched": self.sched.state_dict(), "swa": self.swa.state_dict(), "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
        self.sched.load_state_dict(sd["sched"])
        self.swa.load_state_dict(sd["swa"])
        self.step = sd["step"]


def save(state, folder):
    dcp.save({"train": state}, checkpoint_id=Path(folder) / f"{state.step:06d}")


def load_newest(state, folder):
    newest = sorted(p for p in Path(folder).iterdir() if p.is_dir())[-1]
    dcp.load({"train": state}, checkpoint_id=newest)
