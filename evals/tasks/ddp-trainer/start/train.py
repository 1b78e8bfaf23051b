"""torchrun --nproc-per-node 2 train.py max_steps=100 [checkpoint=FILE] [resume=FILE]"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mixer import Mixer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEFAULTS = {"max_steps": 8, "save_at": 4, "batch": 20, "schedule_steps": 24, "checkpoint": "", "resume": ""}


def measurements(count):
    gen = torch.Generator().manual_seed(11)
    centres = torch.randn(6, 12, 8, generator=gen)
    labels = torch.randint(0, 6, (count,), generator=gen)
    return TensorDataset(centres[labels] + 0.7 * torch.randn(count, 12, 8, generator=gen), labels)


class Trainer:
    def __init__(self, options):
        self.options = options
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        self.build_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.05)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=4e-3, total_steps=options["schedule_steps"], cycle_momentum=False
        )
        data = measurements(100)
        self.sampler = DistributedSampler(data, self.world, self.rank, shuffle=True, drop_last=True)
        self.loader = DataLoader(data, batch_size=options["batch"] // self.world, sampler=self.sampler)
        self.step = 0

    def build_model(self):
        self.model = DistributedDataParallel(Mixer())

    def batches(self):
        """From the position of self.step on, epoch after epoch."""
        while True:
            epoch, done = divmod(self.step, len(self.loader))
            self.sampler.set_epoch(epoch)
            for number, batch in enumerate(self.loader):
                if number >= done:
                    yield batch

    def fit(self):
        for x, y in self.batches():
            if self.step == self.options["max_steps"]:
                return
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            self.report(loss)
            if self.options["checkpoint"] and self.step == self.options["save_at"]:
                self.save(Path(self.options["checkpoint"]))

    def report(self, loss):
        if self.rank == 0:
            print(f"step {self.step} loss {loss.item():.4f} lr {self.schedule.get_last_lr()[0]:.2e}", flush=True)

    def save(self, path):
        if self.rank == 0:
            state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save({**state, "schedule": self.schedule.state_dict(), "step": self.step}, path)
        dist.barrier()

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]


def main():
    options = dict(DEFAULTS)
    for word in sys.argv[1:]:
        key, value = word.split("=", 1)
        options[key] = type(DEFAULTS[key])(value)
    dist.init_process_group("gloo")
    trainer = Trainer(options)
    if options["resume"]:
        trainer.load(Path(options["resume"]))
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
