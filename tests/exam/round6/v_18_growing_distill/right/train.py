"""Progressive distillation: the student starts with one block and gets another every few steps, until it has the
depth of the teacher. New blocks start as the identity; the moments of the old parameters are kept."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

FEATURES, CLASSES, FINAL_DEPTH = 12, 6, 3


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Student(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.dim = dim
        self.stem = nn.Linear(FEATURES, dim)
        self.blocks = nn.ModuleList()
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def new_block(dim, index):
    torch.manual_seed(400 + index)
    return fully_shard(Block(dim))


def teacher_net():
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, CLASSES))
    for p in net.parameters():
        p.data.mul_(2.0)
    return fully_shard(net.requires_grad_(False))


def build(depth):
    """A student of the given depth. Each part is sharded by itself and there is no sharded root, so that blocks can
    be added at any time."""
    torch.manual_seed(1)
    student = Student()
    fully_shard(student.stem)
    fully_shard(student.head)
    for i in range(depth):
        student.blocks.append(new_block(student.dim, i))
    return student


def optimizer_for(student, lr):
    """One group per part, in the order in which the parts came to be."""
    groups = [{"params": [*student.stem.parameters(), *student.head.parameters()]}]
    groups += [{"params": list(block.parameters())} for block in student.blocks]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.01)


def grow(student, opt):
    block = new_block(student.dim, len(student.blocks))
    student.blocks.append(block)
    opt.add_param_group({"params": list(block.parameters())})


def save(folder, step, student, opt):
    model, optim = get_state_dict(student, opt)
    path = os.path.join(folder, f"depth{len(student.blocks)}-step{step:04d}")
    dcp.save({"model": model, "optim": optim, "step": step}, checkpoint_id=path)


def load(folder, lr):
    newest = max(os.listdir(folder), key=lambda d: int(d.split("step")[1]))
    student = build(depth=int(newest.split("-")[0][len("depth") :]))
    opt = optimizer_for(student, lr)
    model, optim = get_state_dict(student, opt)
    state = {"model": model, "optim": optim, "step": 0}
    dcp.load(state, checkpoint_id=os.path.join(folder, newest))
    set_state_dict(student, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return student, opt, state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--grow-every", type=int, default=8)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="growing")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    teacher = teacher_net()
    if args.resume:
        student, opt, step = load(args.resume, args.lr)
    else:
        student, step = build(depth=1), 0
        opt = optimizer_for(student, args.lr)

    n = args.batch // world
    while step < args.steps:
        if step and step % args.grow_every == 0 and len(student.blocks) < FINAL_DEPTH:
            grow(student, opt)
        x = torch.randn(args.batch, FEATURES, generator=torch.Generator().manual_seed(step))[rank * n : (rank + 1) * n]
        with torch.no_grad():
            target = teacher(x).softmax(-1)
        loss = F.cross_entropy(student(x), target)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} depth {len(student.blocks)} loss {shown:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(args.out, step, student, opt)

    if args.export:
        full = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
