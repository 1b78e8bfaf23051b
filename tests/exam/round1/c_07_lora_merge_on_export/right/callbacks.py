from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from lora import LoRALinear


class ExportMerged:
    """Writes plain (adapter-free) weights for the serving team."""

    def __init__(self, folder, every):
        self.folder, self.every = folder, every

    def after_step(self, run):
        if self.every and run.step % self.every == 0:
            self.write(run, f"merged_{run.step}.pt")

    def write(self, run, name):
        adapters = [m for m in run.model.modules() if isinstance(m, LoRALinear)]
        for m in adapters:
            m.merge()
        plain = {}
        for key, p in run.model.named_parameters():
            if "lora_" not in key:
                plain[key.replace(".base.", ".")] = p.full_tensor().detach().clone()
        for m in adapters:
            m.unmerge()
        if dist.get_rank() == 0 and self.folder:
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            torch.save(plain, Path(self.folder) / name)


class Checkpointer:
    def __init__(self, folder, every):
        self.folder, self.every = folder, every

    def after_step(self, run):
        if self.folder and self.every and run.step % self.every == 0:
            m, o = get_state_dict(run.model, run.opt)
            dcp.save({"m": m, "o": o}, checkpoint_id=f"{self.folder}/it{run.step:04d}")


def resume(run, folder):
    path = sorted(Path(folder).glob("it*"))[-1]
    m, o = get_state_dict(run.model, run.opt)
    state = {"m": m, "o": o}
    dcp.load(state, checkpoint_id=str(path))
    set_state_dict(run.model, run.opt, model_state_dict=state["m"], optim_state_dict=state["o"])
    run.step = int(path.name[2:])
