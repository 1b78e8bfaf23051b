"""Three tasks take turns; each has its adapters, its optimizer and its own count of steps on one frozen sharded backbone."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from adapters import parameters_of, select
from backbone import load_backbone
from tasks import STRIDE, rows, task_of


class TaskTrainer:
    def __init__(self, model, name, lr=1e-2):
        self.model, self.name, self.count = model, name, 0
        self.params = parameters_of(model, name)
        self.optimizer = torch.optim.Adam(self.params.values(), lr=lr)
        self.lr = lr

    def step(self, batch, rank, world):
        select(self.model, self.name)
        x = rows(self.name, self.count, batch).chunk(world)[rank]
        self.optimizer.param_groups[0]["lr"] = self.lr * min(1.0, (self.count + 1) / 3)
        loss = F.cross_entropy(self.model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(self.params.values()), 1.0)
        self.optimizer.step()
        self.model.zero_grad()
        self.count += 1
        return loss.detach() / world

    def state(self):
        """tensors are given out as they are, so the same call serves saving and loading in place"""
        for p in self.params.values():
            if p not in self.optimizer.state:
                zero = torch.zeros_like
                self.optimizer.state[p] = {
                    "step": torch.zeros(()),
                    "exp_avg": zero(p.detach()),
                    "exp_avg_sq": zero(p.detach()),
                }
        return {
            "weights": {n: p.detach() for n, p in self.params.items()},
            "moments": {n: dict(self.optimizer.state[p]) for n, p in self.params.items()},
            "count": self.count,
        }


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = load_backbone(list(STRIDE))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    trainers = {t: TaskTrainer(model, t) for t in STRIDE}

    step = 0
    if args.resume:
        step = max(int(d) for d in os.listdir(args.resume))
        state = {t: trainer.state() for t, trainer in trainers.items()}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, str(step)))
        for t, trainer in trainers.items():
            trainer.count = state[t]["count"]
    while step < args.steps:
        task = task_of(step)
        loss = trainers[task].step(args.batch, rank, world)
        dist.all_reduce(loss)
        step += 1
        if rank == 0:
            print(f"step {step} task {task} loss {loss.item():.4f}")
        if args.save_every and step % args.save_every == 0:
            dcp.save(
                {t: trainer.state() for t, trainer in trainers.items()}, checkpoint_id=os.path.join(args.out, str(step))
            )

    if args.export:
        named = {n: p.detach() for t in trainers.values() for n, p in t.params.items()}
        full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in named.items()}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
