import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Snapshot:
    """Tensors go through DCP; the small things go into one meta.pt that rank 0 writes."""

    def __init__(self, model, opt, sched):
        self.model, self.opt, self.sched = model, opt, sched

    def save(self, root, step):
        path = os.path.join(root, f"snap_{step:05d}")
        msd, osd = get_state_dict(self.model, self.opt)
        dcp.save({"model": msd, "optim": osd}, checkpoint_id=path)
        rng = [None] * dist.get_world_size()
        dist.all_gather_object(rng, torch.get_rng_state())
        if dist.get_rank() == 0:
            torch.save({"step": step, "sched": self.sched.state_dict(), "rng": rng}, os.path.join(path, "meta.pt"))
        dist.barrier()

    def load(self, root):
        path = os.path.join(root, sorted(d for d in os.listdir(root) if d.startswith("snap_"))[-1])
        msd, osd = get_state_dict(self.model, self.opt)
        dcp.load({"model": msd, "optim": osd}, checkpoint_id=path)
        set_state_dict(self.model, self.opt, model_state_dict=msd, optim_state_dict=osd)
        meta = torch.load(os.path.join(path, "meta.pt"))
        self.sched.load_state_dict(meta["sched"])
        torch.set_rng_state(meta["rng"][0])
        return meta["step"]
