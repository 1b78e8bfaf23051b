import os

import torch
import torch.distributed as dist


class Callback:
    def on_step_end(self, trainer, loss): ...
    def on_train_end(self, trainer): ...


class Logger(Callback):
    def __init__(self, every):
        self.every = every

    def on_step_end(self, trainer, loss):
        if trainer.step % self.every == 0:
            value = loss.clone()
            dist.all_reduce(value)
            if dist.get_rank() == 0:
                print(f"step {trainer.step} loss {value.item() / dist.get_world_size():.6f}", flush=True)


class Checkpointer(Callback):
    """One file per rank holding the local shards."""

    def __init__(self, folder, every):
        self.folder, self.every = folder, every

    def on_step_end(self, trainer, loss):
        if self.every and trainer.step % self.every == 0:
            path = os.path.join(self.folder, f"{trainer.step:05d}")
            os.makedirs(path, exist_ok=True)
            torch.save(trainer.local_state(), os.path.join(path, f"rank{dist.get_rank()}.pt"))
            dist.barrier()

    @staticmethod
    def latest(folder):
        path = os.path.join(folder, max(os.listdir(folder)))
        return torch.load(os.path.join(path, f"rank{dist.get_rank()}.pt"))


class Evaluate(Callback):
    @torch.no_grad()
    def on_train_end(self, trainer):
        x, y = trainer.data.test()
        trainer.model.eval()
        hits = (trainer.model(x).argmax(-1) == y).float().mean()
        dist.all_reduce(hits)
        if dist.get_rank() == 0:
            print(f"test accuracy {hits.item() / dist.get_world_size():.4f}", flush=True)
