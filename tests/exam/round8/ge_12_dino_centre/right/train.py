"""Self-distillation without labels (DINO): student and EMA teacher, both sharded with FSDP2."""
import argparse
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ssl_data import dataset
from ssl_parts import Encoder, TeacherHead, follow, teacher_momentum, views


class Run(Stateful):
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(22)
        self.student = Encoder()
        self.teacher = Encoder().requires_grad_(False)
        self.teacher.load_state_dict(self.student.state_dict())
        for net in (self.student, self.teacher):
            fully_shard(net.body)
            fully_shard(net, reshard_after_forward=True)
        self.head = TeacherHead(self.student.prototypes.shape[0])
        frozen_first = [{"params": [self.student.prototypes], "name": "prototypes"},
                        {"params": [p for n, p in self.student.named_parameters() if n != "prototypes"]}]
        self.optimizer = torch.optim.AdamW(frozen_first, lr=args.lr, weight_decay=0.02, eps=1e-6)
        self.rng = torch.Generator().manual_seed(23)
        self.step = 0

    def state_dict(self):
        student, optim = get_state_dict(self.student, self.optimizer)
        return {"student": student, "optim": optim, "teacher": get_model_state_dict(self.teacher),
                "centre": self.head.centre, "rng": self.rng.get_state(), "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.student, self.optimizer, model_state_dict=state["student"], optim_state_dict=state["optim"])
        set_model_state_dict(self.teacher, state["teacher"])
        self.head.centre = state["centre"]
        self.rng.set_state(state["rng"])
        self.step = state["step"]

    def train_step(self, data):
        n = self.args.batch // self.world
        mine = slice(self.rank * n, (self.rank + 1) * n)
        x = data[torch.randperm(len(data), generator=self.rng)[:self.args.batch]]
        globals_ = [views(x, self.rng, local=False)[mine] for _ in range(2)]
        locals_ = [views(x, self.rng, local=True)[mine] for _ in range(3)]

        teacher_logits = self.teacher(torch.cat(globals_))
        targets = self.head.targets(teacher_logits, self.step).chunk(2)
        student = torch.log_softmax(self.student(torch.cat(globals_ + locals_)) / 0.1, -1).chunk(5)
        terms = [-(t * s).sum(-1).mean() for i, t in enumerate(targets) for j, s in enumerate(student) if i != j]
        loss = torch.stack(terms).mean()

        self.optimizer.zero_grad()
        loss.backward()
        if self.step < self.args.freeze_prototypes:
            self.student.prototypes.grad = None
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 2.0)
        self.optimizer.step()
        self.head.update(teacher_logits)
        follow(self.teacher, self.student, teacher_momentum(self.step, self.args.steps))
        self.step += 1
        return loss.detach()


def nearest_neighbour_accuracy(run, bank, bank_labels, probe, probe_labels):
    with torch.no_grad():
        similarity = run.teacher(probe) @ run.teacher(bank).t()
    return (bank_labels[similarity.argmax(1)] == probe_labels).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--freeze-prototypes", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--save-dir")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    run = Run(args)
    data, labels = dataset(640, 24)
    train, probe = data[:512], data[512:]
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(re.sub(r"\D", "", d)))
        dcp.load({"run": run}, checkpoint_id=os.path.join(args.resume, newest))

    while run.step < args.steps:
        loss = run.train_step(train) / run.world
        dist.all_reduce(loss)
        if run.rank == 0 and run.step % 6 == 0:
            print(f"step {run.step} loss {loss.item():.5f}", flush=True)
        if args.save_every and run.step % args.save_every == 0:
            dcp.save({"run": run}, checkpoint_id=os.path.join(args.save_dir, f"step{run.step}"))

    score = nearest_neighbour_accuracy(run, train, labels[:512], probe, labels[512:])
    if run.rank == 0:
        print(f"nearest neighbour accuracy of the teacher {score:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
