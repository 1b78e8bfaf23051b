import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class TrainState:
    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.epoch = 0

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "scheduler": self.scheduler.state_dict(), "epoch": self.epoch}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch = state["epoch"]


def save(folder, state):
    dcp.save({"train": state}, checkpoint_id=os.path.join(folder, f"epoch_{state.epoch}"))


def load_newest(folder, state):
    epochs = [int(d.split("_")[1]) for d in os.listdir(folder) if d.startswith("epoch_")]
    dcp.load({"train": state}, checkpoint_id=os.path.join(folder, f"epoch_{max(epochs)}"))
