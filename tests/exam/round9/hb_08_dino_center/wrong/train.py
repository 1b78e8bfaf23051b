import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from dino import Backbone, DINOLoss, update_teacher

N_PROTO = 32


def crops(x, gen):
    """A random 8x8 crop with random brightness from every 12x12 image."""
    pos = torch.randint(0, 5, (len(x), 2), generator=gen).tolist()
    gain = 1 + 0.2 * torch.randn(len(x), 1, 1, 1, generator=gen)
    return torch.stack([im[:, i : i + 8, j : j + 8] for im, (i, j) in zip(x, pos)]) * gain


def make_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 8, (n,), generator=g)
    proto = torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    return proto[kind] + 0.4 * torch.randn(n, 1, 12, 12, generator=g) + 0.5


def wrap(net):
    fully_shard(net.body)
    fully_shard(net.head)
    return fully_shard(net)


class State:
    """Everything that a checkpoint holds."""

    def __init__(self, student, teacher, opt, criterion, gen):
        self.student, self.teacher, self.opt, self.criterion, self.gen = student, teacher, opt, criterion, gen
        self.step = 0

    def collect(self):
        model, optim = get_state_dict(self.student, self.opt)
        return {
            "student": model,
            "optim": optim,
            "teacher": get_model_state_dict(self.teacher),
            "loss": self.criterion.state_dict(),
            "gen": self.gen.get_state(),
            "step": self.step,
        }

    def save(self, root):
        dcp.save(self.collect(), checkpoint_id=os.path.join(root, f"ckpt-{self.step:04d}"))

    def restore(self, root):
        state = self.collect()
        dcp.load(state, checkpoint_id=os.path.join(root, max(os.listdir(root))))
        set_state_dict(self.student, self.opt, model_state_dict=state["student"], optim_state_dict=state["optim"])
        set_model_state_dict(self.teacher, state["teacher"])
        self.gen.set_state(state["gen"])
        self.step = state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="dino_ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    student = Backbone(N_PROTO)
    teacher = copy.deepcopy(student).requires_grad_(False)
    wrap(student), wrap(teacher)
    opt = torch.optim.AdamW(student.parameters(), lr=args.lr, weight_decay=0.04)
    criterion = DINOLoss(N_PROTO)
    data = make_images(256, 1)
    run = State(student, teacher, opt, criterion, torch.Generator().manual_seed(9))
    if args.resume:
        run.restore(args.resume)

    while run.step < args.steps:
        # schedules are functions of the step alone
        cosine = 0.5 * (1 + math.cos(math.pi * run.step / args.steps))
        lr = args.lr * min(1.0, (run.step + 1) / 8) * (0.4 + 0.6 * cosine)
        for g in opt.param_groups:
            g["lr"] = lr
        momentum = 0.97 - 0.07 * cosine

        x = data[torch.randint(0, len(data), (args.batch,), generator=run.gen)]
        a, b = crops(x, run.gen)[rank::world], crops(x, run.gen)[rank::world]
        both = torch.cat([a, b])
        s = student(both)
        with torch.no_grad():
            t = teacher(both)
        ta, tb = t.chunk(2)
        loss = criterion(s, torch.cat([tb, ta]))
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_teacher(teacher, student, momentum)
        run.step += 1

        if run.step % 10 == 0:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {run.step} loss {mean.item():.4f} center norm {criterion.center.norm():.4f}")
        if args.save_every and run.step % args.save_every == 0:
            run.save(args.out)

    if args.export:
        full = StateDictOptions(full_state_dict=True)
        sd = {"teacher": get_model_state_dict(teacher, options=full), "student": get_model_state_dict(student, options=full)}
        if rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
