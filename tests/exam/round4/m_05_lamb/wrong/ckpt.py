import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.stateful import Stateful


class TrainState(Stateful):
    """Model shards, the optimizer's per-parameter tensors under the parameter's name, and the step."""

    def __init__(self, model, opt):
        self.model, self.opt, self.step = model, opt, 0

    def state_dict(self):
        slots = {}
        for name, p in self.model.named_parameters():
            if p not in self.opt.state:
                import torch
                self.opt.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p),
                                     "exp_avg_sq": torch.zeros_like(p)}
            slots[name] = dict(self.opt.state[p])
        return {"model": get_model_state_dict(self.model), "slots": slots, "step": self.step}

    def load_state_dict(self, sd):
        set_model_state_dict(self.model, sd["model"])
        for name, p in self.model.named_parameters():
            self.opt.state[p] = dict(sd["slots"][name])
        self.step = sd["step"]


def save(state, root):
    dcp.save({"app": state}, checkpoint_id=os.path.join(root, f"s{state.step:05d}"))


def load(state, root):
    newest = max(d for d in os.listdir(root) if d.startswith("s0"))
    dcp.load({"app": state}, checkpoint_id=os.path.join(root, newest))
