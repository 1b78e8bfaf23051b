import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class TrainState(Stateful):
    def __init__(self, model, optimizer, loader):
        self.model, self.optimizer, self.loader, self.step = model, optimizer, loader, 0

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "loader": self.loader.state_dict(), "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.loader.load_state_dict(state["loader"])
        self.step = state["step"]

    def save(self, root):
        dcp.save({"train": self}, checkpoint_id=os.path.join(root, f"global_step{self.step}"))

    def restore(self, root):
        newest = max(os.listdir(root), key=lambda d: int(d.removeprefix("global_step")))
        dcp.load({"train": self}, checkpoint_id=os.path.join(root, newest))
