import os
import re

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful


class Run(Stateful):
    def __init__(self, student, teacher, opt, criterion):
        self.student, self.teacher, self.opt, self.criterion = student, teacher, opt, criterion
        self.step = 0

    def state_dict(self):
        s, o = get_state_dict(self.student, self.opt)
        return {
            "student": s,
            "opt": o,
            "teacher": get_model_state_dict(self.teacher),
            "criterion": self.criterion.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, sd):
        set_state_dict(self.student, self.opt, model_state_dict=sd["student"], optim_state_dict=sd["opt"])
        set_model_state_dict(self.teacher, sd["teacher"])
        self.criterion.load_state_dict(sd.get("criterion", {}))
        self.step = sd["step"]

    def save(self, out):
        dcp.save({"run": self}, checkpoint_id=os.path.join(out, f"ep{self.step:05d}"))

    def restore(self, folder):
        names = [n for n in os.listdir(folder) if re.fullmatch(r"ep\d+", n)]
        dcp.load({"run": self}, checkpoint_id=os.path.join(folder, max(names)))
