import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from curriculum import draw


class Engine:
    def __init__(self, model, optimizer, scheduler, curriculum, batch, width, seed):
        self.model, self.optimizer, self.scheduler, self.curriculum = model, optimizer, scheduler, curriculum
        self.batch, self.width, self.seed = batch, width, seed
        self.step = 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def _state(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optim": optim,
            "scheduler": self.scheduler.state_dict(),
            "curriculum": self.curriculum.state_dict(),
            "step": self.step,
        }

    def save(self, folder):
        dcp.save(self._state(), checkpoint_id=os.path.join(folder, f"{self.step:05d}"))

    def load(self, folder):
        state = self._state()
        dcp.load(state, checkpoint_id=os.path.join(folder, max(os.listdir(folder))))
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.curriculum.load_state_dict(state["curriculum"])
        self.step = state["step"]

    def run(self, steps):
        """Yields the metrics of each step."""
        n = self.batch // self.world
        while self.step < steps:
            x, y = draw(self.curriculum, self.step, self.batch, self.width, self.seed)
            x, y = (t[self.rank * n : (self.rank + 1) * n] for t in (x, y))
            loss = F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            mean = mean.item() / self.world
            self.step += 1
            used = self.curriculum.level
            self.curriculum.update(mean)
            yield {"step": self.step, "loss": mean, "level": used}
