import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict

from engine import Callback

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
LOAD = StateDictOptions(full_state_dict=True)


class Log(Callback):
    def __init__(self, every):
        self.every = every

    def on_step(self, run):
        if run.step % self.every == 0:
            v = run.last.clone()
            dist.all_reduce(v)
            if dist.get_rank() == 0:
                print(f"step {run.step} loss {v.item() / dist.get_world_size():.4f}", flush=True)

    def on_stage(self, run, stage):
        if dist.get_rank() == 0:
            print(f"-- from step {run.step}: {stage}", flush=True)


class Snapshots(Callback):
    """Full checkpoints in one file, written by rank 0, read by rank 0 and broadcast."""

    def __init__(self, model, opt, every, folder, resume):
        self.model, self.opt, self.every, self.folder, self.resume = model, opt, every, folder, resume

    def on_start(self, run):
        if not self.resume:
            return
        blob = [None]
        if dist.get_rank() == 0:
            name = sorted(n for n in os.listdir(self.resume) if n.endswith(".ckpt"))[-1]
            blob = [torch.load(os.path.join(self.resume, name), weights_only=False)]
        dist.broadcast_object_list(blob, src=0)
        model_state, opt_state, run.step = blob[0]
        set_state_dict(self.model, self.opt, model_state_dict=model_state, optim_state_dict=opt_state, options=LOAD)

    def on_step(self, run):
        if self.every and run.step % self.every == 0:
            m, o = get_state_dict(self.model, self.opt, options=FULL)
            if dist.get_rank() == 0:
                os.makedirs(self.folder, exist_ok=True)
                path = os.path.join(self.folder, f"{run.step:06d}.ckpt")
                torch.save([m, o, run.step], path + ".part")
                os.rename(path + ".part", path)
            dist.barrier()


class Export(Callback):
    def __init__(self, model, path):
        self.model, self.path = model, path

    def on_end(self, run):
        if self.path:
            full = get_model_state_dict(self.model, options=FULL)
            if dist.get_rank() == 0:
                torch.save(full, self.path)
