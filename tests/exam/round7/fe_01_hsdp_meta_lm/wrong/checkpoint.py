import os
import re

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class CheckpointManager:
    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def save(self, folder, step):
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        state = {"model": model_sd, "optim": optim_sd, "sched": self.scheduler.state_dict(), "step": step}
        dcp.save(state, checkpoint_id=os.path.join(folder, f"step_{step:06d}"))

    def load_latest(self, folder):
        names = [n for n in os.listdir(folder) if re.fullmatch(r"step_\d{6}", n)]
        path = os.path.join(folder, max(names))
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        state = {"model": model_sd, "optim": optim_sd, "sched": self.scheduler.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.scheduler.load_state_dict(state["sched"])
        return state["step"]
