import glob
import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class AppState(Stateful):
    def __init__(self, model, optim):
        self.model, self.optim = model, optim

    def state_dict(self):
        m, o = get_state_dict(self.model, self.optim)
        return {"model": m, "optim": o}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.optim, model_state_dict=sd["model"], optim_state_dict=sd["optim"])


def save(folder, step, app, sched):
    dcp.save({"app": app, "sched": sched.state_dict(), "step": step}, checkpoint_id=f"{folder}/it{step:06d}")


def restore(folder, app, sched):
    path = sorted(glob.glob(os.path.join(folder, "it*")))[-1]
    state = {"app": app, "sched": sched.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=path)
    sched.load_state_dict(state["sched"])
    return state["step"]
