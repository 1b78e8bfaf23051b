import os

import torch.distributed.checkpoint as dcp


class Checkpointer:
    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": 0,
        }

    def save(self, folder, step):
        dcp.save({**self.state(), "step": step}, checkpoint_id=os.path.join(folder, f"ckpt_{step}"))

    def load(self, folder):
        steps = [int(d.split("_")[1]) for d in os.listdir(folder) if d.startswith("ckpt_")]
        state = self.state()
        # the tensors of the model are read straight into the live shards
        dcp.load(state, checkpoint_id=os.path.join(folder, f"ckpt_{max(steps)}"))
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        return state["step"]
