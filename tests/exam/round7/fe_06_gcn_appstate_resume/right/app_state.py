import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class AppState(Stateful):
    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.step = 0

    def state_dict(self):
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        return {"model": model_sd, "optim": optim_sd, "scheduler": self.scheduler.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]


class CheckpointManager:
    def __init__(self, folder):
        self.folder = folder

    def steps(self):
        return sorted(int(name[5:]) for name in os.listdir(self.folder) if name.startswith("iter_"))

    def save(self, app):
        dcp.save({"app": app}, checkpoint_id=os.path.join(self.folder, f"iter_{app.step}"))

    def restore(self, app):
        dcp.load({"app": app}, checkpoint_id=os.path.join(self.folder, f"iter_{self.steps()[-1]}"))
