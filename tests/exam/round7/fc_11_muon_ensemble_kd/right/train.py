"""Distil an ensemble of frozen teachers into one student; Muon for the hidden matrices, AdamW for the rest."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from muon import Muon

DIM, CLASSES = 16, 6


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp = nn.Linear(DIM, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.inp(x)
        for h in self.hidden:
            x = x + torch.relu(h(x))
        return self.out(x)


def make_teachers(k):
    """Teachers are small random functions on parts of the input; each rank holds them all, they are not sharded."""
    g = torch.Generator().manual_seed(70)
    return [(torch.randn(DIM, 24, generator=g) * (torch.rand(DIM, 1, generator=g) > 0.3), torch.randn(24, CLASSES, generator=g) / 3) for _ in range(k)]


@torch.no_grad()
def ensemble(teachers, x, temp):
    """Log of the mean probability of the teachers."""
    logp = torch.stack([F.log_softmax(torch.tanh(x @ a) @ b / temp, -1) for a, b in teachers])
    return torch.logsumexp(logp, 0) - torch.tensor(float(len(teachers))).log()


class Inputs:
    """A stateful stream: one generator, drawn for the global batch on every rank."""

    def __init__(self, size, rank, world):
        self.gen = torch.Generator().manual_seed(123)
        k = size // world
        self.size, self.part = size, slice(rank * k, (rank + 1) * k)

    def __iter__(self):
        while True:
            yield torch.randn(self.size, DIM, generator=self.gen)[self.part]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=28)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(33)
    student = Mlp(20)
    for h in student.hidden:
        fully_shard(h)
    fully_shard(student)
    matrices = [h.weight for h in student.hidden]
    others = [p for n, p in student.named_parameters() if not (n.startswith("hidden") and n.endswith("weight"))]
    opts = [Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=4e-3)]
    decay = lambda s: min(1.0, (s + 1) / 5) * (1 - 0.8 * s / args.steps)
    scheds = [LambdaLR(o, decay) for o in opts]
    teachers, stream = make_teachers(3), Inputs(args.batch, rank, world)

    def snapshot(step):
        model, optim = get_state_dict(student, opts)
        return {"model": model, "optim": optim, "sched": [s.state_dict() for s in scheds], "stream": stream.gen.get_state(), "step": step}

    start = 0
    if args.resume:
        path = max((e.path for e in os.scandir(args.resume)), key=lambda p: int(p.rsplit(".", 1)[1]))
        st = snapshot(0)
        dcp.load(st, checkpoint_id=path)
        set_state_dict(student, opts, model_state_dict=st["model"], optim_state_dict=st["optim"])
        for s, d in zip(scheds, st["sched"]):
            s.load_state_dict(d)
        stream.gen.set_state(st["stream"])
        start = st["step"]

    inputs = iter(stream)
    for step in range(start, args.steps):
        x = next(inputs)
        temp = 2.0 if step < args.steps // 2 else 1.0
        target = ensemble(teachers, x, temp)
        loss = F.kl_div(F.log_softmax(student(x) / temp, -1), target, log_target=True, reduction="batchmean") * temp ** 2
        loss.backward()
        for o, s in zip(opts, scheds):
            o.step()
            s.step()
            o.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1} kd {mean.item():.5f} lr {scheds[0].get_last_lr()[0]:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(step + 1), checkpoint_id=os.path.join(args.out, f"kd.{step + 1}"))

    if args.export:
        full = get_model_state_dict(student, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
