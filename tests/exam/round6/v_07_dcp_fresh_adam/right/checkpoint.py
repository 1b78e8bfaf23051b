import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


class Checkpointer:
    def __init__(self, model, optim, sched, stream):
        self.model, self.optim, self.sched, self.stream = model, optim, sched, stream

    def collect(self, step):
        return {
            "model": self.model.state_dict(),
            "optim": get_optimizer_state_dict(self.model, self.optim),
            "sched": self.sched.state_dict(),
            "stream": self.stream.generator.get_state(),
            "step": step,
        }

    def save(self, folder, step):
        dcp.save(self.collect(step), checkpoint_id=os.path.join(folder, f"step={step}"))

    def load_newest(self, folder):
        newest = max(os.listdir(folder), key=lambda name: int(name.split("=")[1]))
        state = self.collect(0)
        dcp.load(state, checkpoint_id=os.path.join(folder, newest))
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.optim, state["optim"])
        self.sched.load_state_dict(state["sched"])
        self.stream.generator.set_state(state["stream"])
        return state["step"]
