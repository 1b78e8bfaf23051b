import os

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Callback:
    def on_start(self, tr): ...
    def on_step(self, tr): ...


class Resume(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_start(self, tr):
        last = max(os.listdir(self.folder), key=lambda s: int(s[4:]))
        m, o = get_state_dict(tr.model, tr.opt)
        state = {"m": m, "o": o, "tr": {"step": 0, "seen": 0}}
        dcp.load(state, checkpoint_id=os.path.join(self.folder, last))
        set_state_dict(tr.model, tr.opt, model_state_dict=state["m"], optim_state_dict=state["o"])
        tr.step, tr.seen = state["tr"]["step"], state["tr"]["seen"]


class Save(Callback):
    def __init__(self, folder, every):
        self.folder, self.every = folder, every

    def on_step(self, tr):
        if tr.step % self.every == 0:
            m, o = get_state_dict(tr.model, tr.opt)
            dcp.save({"m": m, "o": o, "tr": {"step": tr.step, "seen": tr.seen}},
                     checkpoint_id=os.path.join(self.folder, f"save{tr.step}"))


class LinearDecay(Callback):
    """the rate is a function of the samples seen, set before the next step"""

    def __init__(self, top, total):
        self.top, self.total = top, total

    def on_start(self, tr):
        for g in tr.opt.param_groups:
            g["lr"] = self.top * (1 - 0.8 * tr.seen / self.total)

    on_step = on_start


class Print(Callback):
    def on_step(self, tr):
        if tr.step % 4 == 0:
            dist.all_reduce(v := tr.loss.clone())
            if tr.rank == 0:
                print(f"step {tr.step} seen {tr.seen} loss {v.item() / tr.world:.4f}", flush=True)
