"""Self-distillation without labels (DINO style): student and teacher are FSDP2 modules, the teacher is a moving average with a
rising momentum, its outputs are centred by a running mean over all ranks; a nearest-neighbour probe is run in the middle."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from views import make_pictures, views

EPOCHS, BATCH, PROTOTYPES = 5, 32, 16


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GELU(),
                                  nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.GELU())
        self.mlp = nn.Sequential(nn.Flatten(), nn.Linear(24 * 9, 32), nn.GELU(), nn.Linear(32, 20))
        self.prototypes = nn.Linear(20, PROTOTYPES, bias=False)

    def forward(self, x, features=False):
        z = F.normalize(self.mlp(self.conv(x)), dim=-1)
        return z if features else self.prototypes(z) * 3


def build():
    net = Encoder()
    fully_shard(net.conv)
    fully_shard(net.mlp)
    return fully_shard(net, reshard_after_forward=True)


class State(Stateful):
    """What a checkpoint holds."""

    def __init__(self, student, teacher, opt, center):
        self.student, self.teacher, self.opt, self.center = student, teacher, opt, center
        self.step = 0

    def state_dict(self):
        model, opt = get_state_dict(self.student, self.opt)
        return {"student": model, "opt": opt, "teacher": self.teacher.state_dict(),
                "center": self.center, "step": self.step}

    def load_state_dict(self, s):
        set_state_dict(self.student, self.opt, model_state_dict=s["student"], optim_state_dict=s["opt"])
        self.teacher.load_state_dict(s["teacher"])
        self.center.copy_(s["center"])
        self.step = s["step"]


@torch.no_grad()
def probe(teacher, pictures, kind, rank, world):
    """Share of pictures whose nearest neighbour (leaving itself out) is of the same kind."""
    here = torch.arange(len(pictures)).chunk(world)[rank]
    z = teacher(pictures[here][..., 2:14, 2:14], features=True)
    parts = [torch.empty_like(z) for _ in range(world)]
    dist.all_gather(parts, z)
    bank = torch.cat(parts)
    like = z @ bank.T
    like[torch.arange(len(here)), here] = -2
    hits = (kind[like.argmax(1)] == kind[here]).sum()
    dist.all_reduce(hits)
    return hits.item() / len(pictures)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    student, teacher = build(), build()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    opt = torch.optim.AdamW(student.parameters(), lr=3e-3, eps=1e-5, weight_decay=0.02)
    center = torch.zeros(PROTOTYPES)
    pictures, kind = make_pictures()
    per_epoch = len(pictures) // BATCH
    total = EPOCHS * per_epoch
    state = State(student, teacher, opt, center)
    if args.resume:
        newest = max(os.listdir(args.resume), key=int)
        dcp.load({"run": state}, checkpoint_id=os.path.join(args.resume, newest))

    while state.step < total:
        epoch, place = divmod(state.step, per_epoch)
        order = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(epoch))
        index = order[place * BATCH:(place + 1) * BATCH].chunk(world)[rank]
        a, b, c, d = views(pictures, index, epoch)
        warm = 0.12 - 0.06 * min(1.0, state.step / 10)
        with torch.no_grad():
            logits = teacher(torch.cat([a, b]))
            target = ((logits - center) / (warm * 4)).softmax(-1).chunk(2)
        guess = student(torch.cat([a, b, c, d])).log_softmax(-1).chunk(4)
        pairs = [(t, s) for t in range(2) for s in range(4) if t != s]
        loss = sum(-(target[t] * guess[s]).sum(-1).mean() for t, s in pairs) / len(pairs)
        opt.zero_grad()
        loss.backward()
        opt.step()

        momentum = 1 - 0.1 * (math.cos(math.pi * state.step / total) + 1) / 2
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), student.parameters()):
                p.lerp_(q, 1 - momentum)
            mean = logits.sum(0)
            dist.all_reduce(mean)
            center.lerp_(mean / (2 * BATCH), 0.1)
        state.step += 1

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if state.step % 5 == 0:
            hit = probe(teacher, pictures, kind, rank, world)
            if rank == 0:
                print(f"step {state.step} loss {shown.item() / world:.4f} neighbours {hit:.3f}", flush=True)
        if args.save_every and state.step % args.save_every == 0:
            dcp.save({"run": state}, checkpoint_id=os.path.join(args.out, str(state.step)))

    if args.export:
        full = {f"{n}.{k}": v for n, net in (("student", student), ("teacher", teacher)) for k, v in net.state_dict().items()}
        full = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in full.items()}
        if rank == 0:
            torch.save({**full, "center": center}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
