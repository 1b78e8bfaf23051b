"""Distils a frozen teacher language model into a smaller one, with gradient accumulation over an epoch's micro-batches."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from loader import MicroBatches
from nets import GatedLM

VOCAB, LENGTH, SAMPLES, PER_MICRO = 32, 12, 112, 16


def soft_targets(teacher, ids, temperature):
    with torch.no_grad():
        return F.softmax(4.0 * teacher(ids) / temperature, -1)


class Distiller:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(31)
        self.teacher = GatedLM(VOCAB, 48, 2).eval().requires_grad_(False)
        self.student = GatedLM(VOCAB, 24, 1)
        fully_shard(self.student.blocks[0])
        fully_shard(self.student)
        fully_shard(self.teacher)
        self.opt = torch.optim.SGD(self.student.parameters(), lr=0.5, momentum=0.9)
        data = torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(8))
        self.loader = MicroBatches(data, PER_MICRO, self.rank, self.world)
        self.epoch = self.updates = 0

    def loss(self, ids, temperature=2.0):
        target = soft_targets(self.teacher, ids, temperature)
        logp = F.log_softmax(self.student(ids) / temperature, -1)
        return F.kl_div(logp, target, reduction="none").sum(-1).mean() * temperature**2

    def run_epoch(self):
        accumulate, n = self.args.accumulate, len(self.loader)
        self.loader.epoch = self.epoch
        total = torch.zeros(())
        for i, ids in enumerate(self.loader):
            window = min(accumulate, n - i // accumulate * accumulate)
            last = (i + 1) % accumulate == 0 or i + 1 == n
            self.student.set_requires_gradient_sync((i + 1) % accumulate == 0)
            loss = self.loss(ids)
            (loss / window).backward()
            total += loss.detach()
            if last:
                self.opt.step()
                self.opt.zero_grad()
                self.updates += 1
        dist.all_reduce(total)
        self.epoch += 1
        return total.item() / self.world / n

    def state(self):
        model, opt = get_state_dict(self.student, self.opt)
        return {"student": model, "opt": opt, "epoch": self.epoch, "updates": self.updates}

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=os.path.join(folder, f"epoch{self.epoch:03d}"))

    def restore(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, max(os.listdir(folder))))
        set_state_dict(self.student, self.opt, model_state_dict=state["student"], optim_state_dict=state["opt"])
        self.epoch, self.updates = state["epoch"], state["updates"]

    def fit(self):
        if self.args.resume:
            self.restore(self.args.resume)
        while self.epoch < self.args.epochs:
            loss = self.run_epoch()
            if self.rank == 0:
                print(f"epoch {self.epoch} updates {self.updates} kl {loss:.5f}", flush=True)
            if self.args.save_epochs and self.epoch % self.args.save_epochs == 0 and self.epoch < self.args.epochs:
                self.save(self.args.folder)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=9)
    ap.add_argument("--accumulate", type=int, default=4)
    ap.add_argument("--save-epochs", type=int, default=0)
    ap.add_argument("--folder", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    Distiller(args).fit()
    dist.destroy_process_group()
