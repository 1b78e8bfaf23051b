import os
import re

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, set_model_state_dict)


class Checkpointer:
    def __init__(self, model, optimizer, ema):
        self.model, self.optimizer, self.ema = model, optimizer, ema

    def save(self, root, step):
        state = {
            "model": get_model_state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.ema.shadow,
            "step": step,
        }
        dcp.save(state, checkpoint_id=os.path.join(root, f"step-{step}"))

    def load(self, root):
        steps = [int(m.group(1)) for d in os.listdir(root) if (m := re.fullmatch(r"step-(\d+)", d))]
        state = {
            "model": get_model_state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.ema.shadow,
            "step": 0,
        }
        dcp.load(state, checkpoint_id=os.path.join(root, f"step-{max(steps)}"))
        set_model_state_dict(self.model, state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["step"]
