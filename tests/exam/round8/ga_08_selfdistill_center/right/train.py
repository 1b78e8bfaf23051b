"""Self-distillation (DINO style): sharded student, sharded EMA teacher, running center of the teacher's outputs."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from dino import DinoLoss, encoder, update_teacher
from views import Views


def shard(net):
    for layer in net:
        if len(list(layer.parameters())):
            fully_shard(layer)
    return fully_shard(net)


class Run:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(8)
        self.student, self.teacher = encoder(), encoder()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        shard(self.student), shard(self.teacher)
        self.opt = torch.optim.SGD(self.student.parameters(), lr=0.2, momentum=0.9)
        self.loss_fn, self.views, self.step = DinoLoss(), Views(), 0

    def state(self):
        return {"student": get_model_state_dict(self.student), "teacher": get_model_state_dict(self.teacher),
                "opt": get_optimizer_state_dict(self.student, self.opt), "center": self.loss_fn.center, "step": self.step}

    def load(self, folder):
        last = max((d for d in os.listdir(folder)), key=lambda d: int(d.split("_")[1]))
        st = self.state()
        dcp.load(st, checkpoint_id=os.path.join(folder, last))
        set_model_state_dict(self.student, st["student"])
        set_model_state_dict(self.teacher, st["teacher"])
        set_optimizer_state_dict(self.student, self.opt, st["opt"])
        self.loss_fn.center, self.step = st["center"], st["step"]

    def momentum(self):
        return 1 - 0.1 * (math.cos(math.pi * self.step / self.args.steps) + 1) / 2

    def train_step(self):
        v = [x.chunk(self.world)[self.rank] for x in self.views(self.step, self.args.batch)]
        with torch.no_grad():
            teacher = [self.teacher(x) for x in v]
        student = self.student(torch.cat(v)).chunk(2)
        loss = self.loss_fn(student, teacher)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        update_teacher(self.student, self.teacher, self.momentum())
        self.loss_fn.update_center(teacher)
        self.step += 1
        return loss.detach()

    def fit(self):
        while self.step < self.args.steps:
            loss = self.train_step() / self.world
            dist.all_reduce(loss)
            if self.rank == 0 and self.step % 6 == 0:
                print(f"step {self.step} loss {loss.item():.4f} |center| {self.loss_fn.center.norm().item():.4f}")
            if self.args.save_every and self.step % self.args.save_every == 0:
                dcp.save(self.state(), checkpoint_id=os.path.join(self.args.out, f"step_{self.step}"))


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(args)
    if args.resume:
        run.load(args.resume)
    run.fit()
    if args.export:
        out = {f"{net}.{n}": p.detach().full_tensor() for net in ("student", "teacher")
               for n, p in getattr(run, net).named_parameters()}
        out["center"] = run.loss_fn.center
        if run.rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()
