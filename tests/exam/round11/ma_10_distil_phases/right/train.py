"""Distil a language model in two phases: hidden states first, then output distributions.

The teacher is trained briefly by the script itself, on every rank alike, before both models are sharded.
"""
import argparse
import json
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from nets import LM, Student
from phases import PHASES

VOCAB, LEN, BATCH = 24, 10, 16


def text(seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (BATCH, LEN), generator=g)
    for t in range(2, LEN):
        ids[:, t] = (ids[:, t - 1] + ids[:, t - 2]) % VOCAB
    return ids


def make_teacher():
    torch.manual_seed(1)
    teacher = LM(VOCAB, 32, 4)
    opt = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    for i in range(25):
        ids = text(10_000 + i)
        logits, _ = teacher(ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        opt.step()
        opt.zero_grad()
    return teacher.requires_grad_(False).eval()


def shard(lm):
    for cell in lm.cells:
        fully_shard(cell)


def new_optimizer(student, phase):
    moving = [p for n, p in student.named_parameters() if phase.trained(n)]
    return torch.optim.AdamW(moving, lr=phase.lr, weight_decay=0.0)


def save(root, at, done, student, opt):
    path = pathlib.Path(root) / f"{at}-{done:04d}"
    dcp.save({"student": get_model_state_dict(student), "opt": get_optimizer_state_dict(student, opt)}, checkpoint_id=str(path))
    if dist.get_rank() == 0:
        (pathlib.Path(root) / "latest.json").write_text(json.dumps({"phase": at, "done": done, "path": path.name}))
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="distil")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    teacher = make_teacher()
    shard(teacher)
    fully_shard(teacher)
    torch.manual_seed(2)
    student = Student(VOCAB, 20, 2, 32)
    shard(student.lm)
    fully_shard(student)

    first, done, opt = 0, 0, None
    if args.resume:
        latest = json.loads((pathlib.Path(args.resume) / "latest.json").read_text())
        first, done = latest["phase"], latest["done"]
        opt = new_optimizer(student, PHASES[first])
        state = {"student": get_model_state_dict(student), "opt": get_optimizer_state_dict(student, opt)}
        dcp.load(state, checkpoint_id=str(pathlib.Path(args.resume) / latest["path"]))
        set_model_state_dict(student, state["student"])
        set_optimizer_state_dict(student, opt, state["opt"])

    for at in range(first, len(PHASES)):
        phase = PHASES[at]
        if opt is None:
            opt = new_optimizer(student, phase)
        while done < phase.steps:
            ids = text(100 * at + done)[rank::world]
            loss = phase.loss(student, teacher, ids)
            loss.backward()
            opt.step()
            student.zero_grad()
            done += 1
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"phase {phase.name} step {done} loss {mean.item():.4f}", flush=True)
            if args.save_every and done % args.save_every == 0:
                save(args.out, at, done, student, opt)
        opt, done = None, 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
