import glob
import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class App(Stateful):
    def __init__(self, model, opt, sched):
        self.model, self.opt, self.sched = model, opt, sched
        self.step = 0

    def state_dict(self):
        return {"model": get_model_state_dict(self.model), "optim": get_optimizer_state_dict(self.model, self.opt),
                "sched": self.sched.state_dict(), "step": self.step}

    def load_state_dict(self, sd):
        set_model_state_dict(self.model, sd["model"])
        set_optimizer_state_dict(self.model, self.opt, sd["optim"])
        self.sched.load_state_dict(sd["sched"])
        self.step = sd["step"]

    def save(self, folder):
        dcp.save({"app": self}, checkpoint_id=os.path.join(folder, f"ckpt-{self.step:05d}"))

    def restore(self, folder):
        found = sorted(p for p in glob.glob(os.path.join(folder, "ckpt-*")) if os.path.exists(os.path.join(p, ".metadata")))
        dcp.load({"app": self}, checkpoint_id=found[-1])
