import os

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Bundle:
    """Several optimizers that act, and are saved, as one."""

    def __init__(self, model, **optimizers):
        self.model, self.optimizers, self.step_count = model, optimizers, 0

    def step(self):
        for o in self.optimizers.values():
            o.step()
        self.step_count += 1

    def zero_grad(self):
        self.model.zero_grad(set_to_none=True)

    def scale(self, factor, peak):
        for name, o in self.optimizers.items():
            for g in o.param_groups:
                g["lr"] = peak[name] * factor

    def _tree(self):
        opts = list(self.optimizers.values())
        m, o = get_state_dict(self.model, opts)
        return {"model": m, "optim": o, "count": torch.tensor(self.step_count)}

    def save(self, root):
        dcp.save(self._tree(), checkpoint_id=os.path.join(root, f"b{self.step_count:06d}"))

    def load(self, root):
        tree = self._tree()
        dcp.load(tree, checkpoint_id=os.path.join(root, sorted(f for f in os.listdir(root) if f[0] == "b")[-1]))
        set_state_dict(self.model, list(self.optimizers.values()),
                       model_state_dict=tree["model"], optim_state_dict=tree["optim"])
        self.step_count = int(tree["count"])
