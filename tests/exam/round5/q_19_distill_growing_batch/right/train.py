"""Stage 1 trains a teacher, stage 2 distils it into a thinner student, with a growing global batch (accumulation)."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from growth import GrowingBatches
from nets import Classifier
from spectra import spectra


def sharded(net):
    for layer in net.layers:
        fully_shard(layer)
    return fully_shard(net)


class Student(nn.Module):
    """Student and the projection that brings its features to the teacher's width; only the student is exported."""

    def __init__(self, wide):
        super().__init__()
        self.net = Classifier(d=12, depth=2)
        self.lift = nn.Linear(12, wide)

    def forward(self, x):
        logits, h = self.net(x, hidden=True)
        return logits, self.lift(h)


def accumulate(model, chunks, loss_sum, size, world):
    """FSDP averages over ranks, so sums are scaled by world / global size."""
    total = 0.0
    for k, ids in enumerate(chunks):
        model.set_requires_gradient_sync(k == len(chunks) - 1)
        loss = loss_sum(ids) * world / size
        loss.backward()
        total += loss.detach() / world
    dist.all_reduce(total)
    return total.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--teacher-steps", type=int, default=8)
    ap.add_argument("--steps", type=int, default=32, help="of both stages together")
    ap.add_argument("--temperature", type=float, default=2.0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    teacher = sharded(Classifier())
    student = Student(24)
    for layer in student.net.layers:
        fully_shard(layer)
    fully_shard(student)
    opts = [torch.optim.SGD(teacher.parameters(), lr=0.1, momentum=0.9), torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)]
    x, y = spectra(150, seed=1)
    batches = GrowingBatches(len(y), 8, (4, 14, 24), cap=7, rank=rank, world=world)

    def bundle(stage):
        model = student if stage else teacher
        m, o = get_state_dict(model, opts[stage])
        s = {"model": m, "opt": o}
        if stage:
            s["teacher"] = get_model_state_dict(teacher)
        return s

    start = 0
    if args.resume:
        start, stage, name = max((int(n.split("-")[1]), int(n.split("-")[2]), n) for n in os.listdir(args.resume))
        s = bundle(stage)
        dcp.load(s, checkpoint_id=os.path.join(args.resume, name))
        set_state_dict(student if stage else teacher, opts[stage], model_state_dict=s["model"], optim_state_dict=s["opt"])
        if stage:
            set_model_state_dict(teacher, s["teacher"])

    def teach(ids):
        return F.cross_entropy(teacher(x[ids]), y[ids], reduction="sum")

    def distil(ids):
        t = args.temperature
        with torch.no_grad():
            goal, feat = teacher(x[ids], hidden=True)
        logits, lifted = student(x[ids])
        soft = F.kl_div((logits / t).log_softmax(-1), (goal / t).log_softmax(-1), log_target=True, reduction="sum") * t * t
        return soft + 0.1 * (lifted - feat).square().mean(-1).sum()

    for step in range(start, args.steps):
        stage = int(step >= args.teacher_steps)
        chunks, size = batches.at(step)
        model = student if stage else teacher
        loss = accumulate(model, chunks, distil if stage else teach, size, world)
        opts[stage].step()
        opts[stage].zero_grad()
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} {'student' if stage else 'teacher'} batch {size} in {len(chunks)} loss {loss:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(bundle(stage), checkpoint_id=os.path.join(args.out, f"ck-{step + 1}-{stage}"))

    if args.export:
        full = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save({k.removeprefix("net."): v for k, v in full.items() if k.startswith("net.")}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
