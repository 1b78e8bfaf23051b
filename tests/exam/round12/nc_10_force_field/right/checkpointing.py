import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class TrainingState(Stateful):
    def __init__(self, model, optim):
        self.model, self.optim, self.step = model, optim, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.optim)
        return {"model": m, "optim": o, "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.optim, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
        self.step = sd["step"]

    def save(self, folder):
        dcp.save({"training": self}, checkpoint_id=os.path.join(folder, f"at{self.step:04d}"))

    def load(self, folder):
        dcp.load({"training": self}, checkpoint_id=os.path.join(folder, sorted(os.listdir(folder))[-1]))
