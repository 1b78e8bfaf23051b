from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Callback:
    def on_step_end(self, trainer):
        pass

    def on_epoch_end(self, trainer, mean_loss):
        pass


class EpochLogger(Callback):
    def on_epoch_end(self, trainer, mean_loss):
        if trainer.rank == 0:
            print(f"epoch {trainer.epoch} step {trainer.step} loss {mean_loss:.5f}", flush=True)


class Checkpointer(Callback):
    def __init__(self, out, every):
        self.out, self.every = Path(out), every

    def on_step_end(self, trainer):
        if trainer.step % self.every == 0:
            model, optim = get_state_dict(trainer.model, trainer.optimizer)
            state = {"model": model, "optim": optim, "progress": trainer.progress()}
            dcp.save(state, checkpoint_id=str(self.out / f"step_{trainer.step:04d}"))


def restore(trainer, folder):
    last = sorted(Path(folder).glob("step_*"))[-1]
    model, optim = get_state_dict(trainer.model, trainer.optimizer)
    state = {"model": model, "optim": optim, "progress": trainer.progress()}
    dcp.load(state, checkpoint_id=str(last))
    set_state_dict(trainer.model, trainer.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    trainer.load_progress(state["progress"])
    dist.barrier()
