import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict


class Keeper:
    """Student, teacher and optimizer in one checkpoint."""

    def __init__(self, student, teacher, opt, rank):
        self.student, self.teacher, self.opt, self.rank = student, teacher, opt, rank

    def _state(self, step):
        m, o = get_state_dict(self.student, self.opt)
        return {"student": m, "opt": o, "teacher": get_model_state_dict(self.teacher), "step": step}

    def save(self, folder, step):
        dcp.save(self._state(step), checkpoint_id=os.path.join(folder, f"mt{step:04d}"))

    def load(self, folder):
        newest = sorted(d for d in os.listdir(folder) if d.startswith("mt"))[-1]
        state = self._state(0)
        dcp.load(state, checkpoint_id=os.path.join(folder, newest))
        set_state_dict(self.student, self.opt, model_state_dict=state["student"], optim_state_dict=state["opt"])
        set_model_state_dict(self.teacher, state["teacher"])
        return state["step"]
