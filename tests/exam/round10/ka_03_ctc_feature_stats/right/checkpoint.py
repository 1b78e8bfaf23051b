import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class AppState(Stateful):
    def __init__(self, model, optimizer, progress):
        self.model, self.optimizer, self.progress = model, optimizer, progress

    def state_dict(self):
        m, o = get_state_dict(self.model, self.optimizer)
        return {"model": m, "optimizer": o, "progress": dict(self.progress)}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.progress.update(state["progress"])


def save(root, app):
    dcp.save({"app": app}, checkpoint_id=os.path.join(root, str(app.progress["step"])))


def load_latest(root, app):
    step = max(int(n) for n in os.listdir(root) if n.isdigit())
    dcp.load({"app": app}, checkpoint_id=os.path.join(root, str(step)))
