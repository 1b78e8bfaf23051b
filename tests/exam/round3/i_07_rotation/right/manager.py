import json
import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict


class CheckpointManager:
    """Keeps the last `keep` checkpoints of a run and finds the newest complete one."""

    def __init__(self, root, keep=3):
        self.root, self.keep = Path(root), keep

    def all(self):
        done = [p for p in self.root.glob("step-*") if (p / "DONE").exists()]
        return sorted(done, key=lambda p: int(p.name[5:]))

    def save(self, step, model, optim, extra):
        path = self.root / f"step-{step}"
        model_sd, optim_sd = get_state_dict(model, optim, options=StateDictOptions(cpu_offload=True))
        dcp.save({"model": model_sd, "optim": optim_sd}, checkpoint_id=path)
        if dist.get_rank() == 0:
            (path / "DONE").touch()
            (self.root / "progress.json").write_text(json.dumps({"step": step, **extra}))
            for old in self.all()[: -self.keep]:
                shutil.rmtree(old)
        dist.barrier()

    def restore(self, model, optim):
        found = self.all()
        if not found:
            raise FileNotFoundError(f"no complete checkpoint in {self.root}")
        path = found[-1]
        model_sd, optim_sd = get_state_dict(model, optim)
        state = {"model": model_sd, "optim": optim_sd}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        return json.loads((self.root / "progress.json").read_text())
