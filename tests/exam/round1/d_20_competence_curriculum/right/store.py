"""Checkpoints in two slots that are written by turns; a small pointer file names the newest complete one."""

import json
import os

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Slots:
    def __init__(self, folder, model, optim, extras):
        self.folder, self.model, self.optim, self.extras = folder, model, optim, extras
        self.turn = 0

    def _state(self):
        m, o = get_state_dict(self.model, self.optim)
        return {"model": m, "optim": o, **{k: e.state_dict() for k, e in self.extras.items()}}

    def save(self, step):
        slot = "AB"[self.turn]
        dcp.save(self._state(), checkpoint_id=os.path.join(self.folder, f"slot_{slot}"))
        self.turn = 1 - self.turn
        if dist.get_rank() == 0:
            path = os.path.join(self.folder, "newest.json")
            with open(path + ".new", "w") as f:
                json.dump({"slot": slot, "step": step}, f)
            os.replace(path + ".new", path)
        dist.barrier()

    def load(self, folder):
        with open(os.path.join(folder, "newest.json")) as f:
            at = json.load(f)
        s = self._state()
        dcp.load(s, checkpoint_id=os.path.join(folder, f"slot_{at['slot']}"))
        set_state_dict(self.model, self.optim, model_state_dict=s["model"], optim_state_dict=s["optim"])
        for k, e in self.extras.items():
            e.load_state_dict(s[k])
        self.turn = 1 - "AB".index(at["slot"])
        return at["step"]
