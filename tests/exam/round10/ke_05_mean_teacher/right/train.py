"""Mean teacher: few labelled images, a consistency loss against an averaged teacher; the teacher is the result."""
import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.distributed.fsdp import fully_shard

STEPS = 40
BATCH = 16
LABELLED = 8
CLASSES = 4
DECAY = 0.99
TEACHER_DTYPE = torch.float32


class ConvStage(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList([ConvStage(1, 8), ConvStage(8, 16), ConvStage(16, 32)])
        self.fc = nn.Linear(32, CLASSES)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.fc(x.mean((2, 3)))


def render(n, g):
    """Bars in four orientations, with noise."""
    y = torch.randint(0, CLASSES, (n,), generator=g)
    off = torch.randint(-3, 4, (n, 1, 1), generator=g)
    r = torch.arange(16).view(1, 16, 1) - 8
    c = torch.arange(16).view(1, 1, 16) - 8
    lines = torch.stack([r - off + 0 * c, c - off + 0 * r, r - c - off, r + c - off], 1)
    img = (lines[torch.arange(n), y].abs() < 2).float()
    return img.unsqueeze(1), y


def batch_for(step, rank, world):
    g = torch.Generator().manual_seed(9000 + step)
    x, y = render(BATCH, g)
    weak = x + 0.3 * torch.randn(x.shape, generator=g)
    strong = x * (torch.rand(x.shape, generator=g) > 0.2) + 0.5 * torch.randn(x.shape, generator=g)
    labelled = torch.arange(BATCH) % (BATCH // LABELLED) == 0
    n = BATCH // world
    mine = slice(rank * n, (rank + 1) * n)
    return weak[mine], strong[mine], y[mine], labelled[mine]


def shard(net):
    for stage in net.stages:
        fully_shard(stage)
    return fully_shard(net, reshard_after_forward=True)


@torch.no_grad()
def update_teacher(teacher, student):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.lerp_(s.to(t.dtype), 1.0 - DECAY)


@torch.no_grad()
def accuracy(net, rank, world):
    x, y = render(128, torch.Generator().manual_seed(1))
    x = x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    hits = (net(x.to(TEACHER_DTYPE)).argmax(1) == y).sum()
    dist.all_reduce(hits)
    return hits.item() / 128


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(21)
    student = ConvNet()
    teacher = copy.deepcopy(student).requires_grad_(False).to(TEACHER_DTYPE)
    student, teacher = shard(student), shard(teacher)
    optim = torch.optim.AdamW(student.parameters(), lr=5e-3, eps=1e-6)

    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d.split("-")[1]))
        m, o = get_state_dict(student, optim)
        state = {"student": m, "optim": o, "teacher": get_model_state_dict(teacher), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(student, optim, model_state_dict=state["student"], optim_state_dict=state["optim"])
        set_model_state_dict(teacher, state["teacher"])
        step = state["step"]

    while step < STEPS:
        weak, strong, y, labelled = batch_for(step, rank, world)
        with torch.no_grad():
            target = teacher(weak.to(TEACHER_DTYPE)).float().softmax(1)
        logits = student(strong)
        per_image = F.cross_entropy(logits, y, reduction="none")
        supervised = (per_image * labelled).sum() * world / LABELLED
        consistency = F.mse_loss(logits.softmax(1), target) * min(1.0, step / 20) * 2
        loss = supervised + consistency
        loss.backward()
        optim.step()
        optim.zero_grad()
        update_teacher(teacher, student)
        step += 1
        if step % 8 == 0:
            acc = accuracy(teacher, rank, world)
            value = loss.detach().clone()
            dist.all_reduce(value)
            if rank == 0:
                print(f"step {step} loss {value.item() / world:.4f} teacher accuracy {acc:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(student, optim)
            dcp.save(
                {"student": m, "optim": o, "teacher": get_model_state_dict(teacher), "step": step},
                checkpoint_id=os.path.join(args.out, f"step-{step}"),
            )

    if args.export:
        full = get_model_state_dict(teacher, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save({k: v.float() for k, v in full.items()}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
