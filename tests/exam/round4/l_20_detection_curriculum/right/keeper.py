"""Keeps the newest two checkpoints and a list of them that is rewritten only when a save is complete."""
import json
import os
import shutil

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Keeper:
    def __init__(self, model, opt, pace):
        self.model, self.opt, self.pace = model, opt, pace

    def save(self, root, step):
        m, o = get_state_dict(self.model, self.opt)
        dcp.save({"m": m, "o": o, "pace": self.pace.state_dict()}, checkpoint_id=os.path.join(root, f"at{step:05d}"))
        if dist.get_rank() == 0:
            done = sorted(d for d in os.listdir(root) if d.startswith("at"))
            for old in done[:-2]:
                shutil.rmtree(os.path.join(root, old))
            with open(os.path.join(root, "list.part"), "w") as f:
                json.dump(done[-2:], f)
            os.replace(os.path.join(root, "list.part"), os.path.join(root, "list.json"))
        dist.barrier()

    def load(self, root):
        path = os.path.join(root, "list.json")
        if not os.path.exists(path):
            return 0
        with open(path) as f:
            names = [n for n in json.load(f) if os.path.exists(os.path.join(root, n, ".metadata"))]
        if not names:
            return 0
        name = names[-1]
        m, o = get_state_dict(self.model, self.opt)
        sd = {"m": m, "o": o, "pace": self.pace.state_dict()}
        dcp.load(sd, checkpoint_id=os.path.join(root, name))
        set_state_dict(self.model, self.opt, model_state_dict=sd["m"], optim_state_dict=sd["o"])
        self.pace.load_state_dict(sd["pace"])
        return int(name[2:])
