import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Keeper:
    def __init__(self, model, opt, sched):
        self.parts = (model, opt)
        self.sched, self.step = sched, 0

    def tree(self):
        m, o = get_state_dict(*self.parts)
        return {"model": m, "opt": o, "sched": self.sched.state_dict(), "step": self.step}

    def write(self, root):
        dcp.save(self.tree(), checkpoint_id=os.path.join(root, f"n{self.step:05d}"))

    def read(self, root):
        t = self.tree()
        dcp.load(t, checkpoint_id=os.path.join(root, max(os.listdir(root))))
        set_state_dict(*self.parts, model_state_dict=t["model"], optim_state_dict=t["opt"])
        self.sched.load_state_dict(t["sched"])
        self.step = t["step"]
