"""Elastic weight consolidation over two regression tasks, with the penalty written on the parameter shards."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

DIM, WIDTH, BATCH = 8, 24, 24
FIRST, STEPS = 6, 14
LAMBDA = 30.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(DIM, WIDTH), nn.Tanh())
        self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        h = self.a(x)
        return self.head(h + self.b(h))


def task_batch(task, index, n):
    g = torch.Generator().manual_seed(10_000 * (task + 1) + index)
    x = torch.randn(n, DIM, generator=g)
    w = torch.randn(DIM, generator=torch.Generator().manual_seed(task))
    return x, torch.sin(x @ w)[:, None]


class Consolidation:
    """Diagonal Fisher information and anchor, both as shards with the placement of the parameter they belong to."""

    def __init__(self, model):
        self.model = model
        self.fisher = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        self.anchor = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for t in (*self.fisher.values(), *self.anchor.values()):
            t.requires_grad_(False)

    def estimate(self, task, samples):
        # One sample per backward, the same one on all ranks: the reduced gradient then is the gradient of that
        # sample and its square may be summed. The mean gradient of different samples could not be squared.
        for i in range(samples):
            x, y = task_batch(task, 500 + i, 1)
            self.model.zero_grad()
            (0.5 * F.mse_loss(self.model(x), y, reduction="sum")).backward()
            with torch.no_grad():
                for n, p in self.model.named_parameters():
                    self.fisher[n].add_(p.grad * p.grad, alpha=1.0 / samples)
        self.model.zero_grad()
        with torch.no_grad():
            for n, p in self.model.named_parameters():
                self.anchor[n].copy_(p)

    def penalty(self):
        """Sum over this rank's shards only: its gradient reaches each shard once and needs no reduction."""
        total = torch.zeros(())
        for n, p in self.model.named_parameters():
            d = p.to_local() - self.anchor[n].to_local()
            total = total + (self.fisher[n].to_local() * d * d).sum()
        return 0.5 * LAMBDA * total

    def state_dict(self):
        return {"fisher": self.fisher, "anchor": self.anchor}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--checkpoint-dir")
    ap.add_argument("--save-at", type=int, default=-1)
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = Net()
    fully_shard(model.b)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ewc = Consolidation(model)

    begin = 0
    if args.resume:
        ms, osd = get_state_dict(model, opt)
        state = {"model": ms, "opt": osd, "ewc": ewc.state_dict(), "step": torch.tensor(0)}
        dcp.load(state, checkpoint_id=os.path.join(args.checkpoint_dir, "ck"))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        begin = int(state["step"])

    for step in range(begin, STEPS):
        task = int(step >= FIRST)
        if step == FIRST:
            ewc.estimate(task=0, samples=6)
            opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        x, y = task_batch(task, step, BATCH)
        pen = ewc.penalty()  # before the forward pass: the root stays gathered from there to the backward pass
        loss = F.mse_loss(model(x[rank::world]), y[rank::world])
        opt.zero_grad()
        (loss + pen if task else loss).backward()
        opt.step()
        shown = torch.stack([loss.detach() / world, pen.detach() * task])
        dist.all_reduce(shown)
        if rank == 0 and step % 2:
            print(f"task {task} step {step + 1} mse {shown[0]:.5f} ewc {shown[1]:.5f}", flush=True)
        if step + 1 == args.save_at:
            ms, osd = get_state_dict(model, opt)
            dcp.save({"model": ms, "opt": osd, "ewc": ewc.state_dict(), "step": torch.tensor(step + 1)},
                     checkpoint_id=os.path.join(args.checkpoint_dir, "ck"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
