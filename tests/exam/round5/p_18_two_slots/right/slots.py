"""Asynchronous checkpoints into two alternating slots; LATEST names the slot that is complete."""
import os
import shutil

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Slots:
    def __init__(self, folder, model, opt):
        self.folder, self.model, self.opt = folder, model, opt
        self.pending, self.turn = None, 0
        self.group = dist.new_group(backend="gloo")  # the writer thread talks on a group of its own

    def _state(self, progress):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "optim": o, **progress}

    def finish(self):
        """Waits for the write in flight, then makes it the newest one."""
        if self.pending is None:
            return
        future, name = self.pending
        future.result()
        dist.barrier()
        if dist.get_rank() == 0:
            tmp = os.path.join(self.folder, "LATEST.tmp")
            with open(tmp, "w") as f:
                f.write(name)
            os.replace(tmp, os.path.join(self.folder, "LATEST"))
        dist.barrier()
        self.pending = None

    def save(self, **progress):
        self.finish()
        name = f"slot_{'ab'[self.turn]}"
        path = os.path.join(self.folder, name)
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        self.pending = dcp.async_save(self._state(progress), checkpoint_id=path, process_group=self.group), name
        self.turn = 1 - self.turn

    def load(self, folder):
        with open(os.path.join(folder, "LATEST")) as f:
            name = f.read().strip()
        sd = self._state({"step": 0, "samples": 0})
        dcp.load(sd, checkpoint_id=os.path.join(folder, name))
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
        self.turn = 1 if name == "slot_a" else 0
        return sd["step"], sd["samples"]
