import os

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict


class Store:
    """Keeps the newest `keep` checkpoints of a model with a list of optimizers."""

    def __init__(self, model, optimizers):
        self.model, self.optimizers = model, list(optimizers)

    def _collect(self):
        return {
            "model": get_model_state_dict(self.model),
            "optim": get_optimizer_state_dict(self.model, self.optimizers),
        }

    def save(self, folder, step):
        dcp.save(self._collect(), checkpoint_id=os.path.join(folder, f"global_step{step}"))

    def load(self, folder):
        steps = [int(n[len("global_step") :]) for n in os.listdir(folder) if n.startswith("global_step")]
        state = self._collect()
        dcp.load(state, checkpoint_id=os.path.join(folder, f"global_step{max(steps)}"))
        set_state_dict(self.model, self.optimizers, model_state_dict=state["model"], optim_state_dict=state["optim"])
        return max(steps)
