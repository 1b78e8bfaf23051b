"""Semi-supervised regression with a mean teacher: few labelled samples, many unlabelled ones."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(2))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.tanh(self.stem(x))
        for b in self.blocks:
            h = h + b(h)
        return self.head(h).squeeze(-1)


def molecules(n, seed):
    """Eight descriptors and a property that depends on a few of them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 8, generator=g)
    return x, torch.sin(x[:, 0] + x[:, 1]) + 0.5 * x[:, 2] * x[:, 3] + 0.3 * x[:, 4]


def shard(net, mesh):
    for b in net.blocks:
        fully_shard(b, mesh=mesh, reshard_after_forward=True)
    return fully_shard(net, mesh=mesh)


@torch.no_grad()
def update_teacher(teacher, student, step, decay=0.9):
    d = min(decay, (1 + step) / (4 + step))
    for name, t in teacher.items():
        t.lerp_(student[name], 1 - d)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--labelled", type=int, default=64)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--consistency", type=float, default=1.0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/mt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(23)
    student, teacher = Net(), Net()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    shard(student, mesh)
    shard(teacher, mesh)
    w_student, w_teacher = dict(student.named_parameters()), dict(teacher.named_parameters())
    opt = torch.optim.AdamW(student.parameters(), lr=0.01)
    x_lab, y_lab = molecules(args.labelled, seed=1)
    x_free, _ = molecules(1024, seed=2)

    def snapshot(step):
        return {"student": w_student, "teacher": w_teacher, "opt": get_optimizer_state_dict(student, opt), "step": step}

    step = 0
    if args.resume:
        sd = snapshot(0)
        dcp.load(sd, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))  # weights are filled in place
        set_optimizer_state_dict(student, opt, sd["opt"])
        step = sd["step"]

    while step < args.steps:
        g = torch.Generator().manual_seed(step)
        lab = torch.randint(args.labelled, (args.batch,), generator=g).chunk(world)[rank]
        free = torch.randint(len(x_free), (2 * args.batch,), generator=g).chunk(world)[rank]
        jitter = 0.1 * torch.randn(2, 2 * args.batch, 8, generator=g)
        j_student, j_teacher = (j.chunk(world)[rank] for j in jitter)
        with torch.no_grad():
            goal = teacher(x_free[free] + j_teacher)
        out = student(torch.cat([x_lab[lab], x_free[free] + j_student]))
        sup = F.mse_loss(out[:len(lab)], y_lab[lab])
        cons = F.mse_loss(out[len(lab):], goal)
        (sup + args.consistency * cons).backward()
        opt.step()
        opt.zero_grad()
        update_teacher(w_teacher, w_student, step)
        step += 1

        shown = torch.stack([sup.detach(), cons.detach()])
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} supervised {shown[0] / world:.4f} consistency {shown[1] / world:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(step), checkpoint_id=os.path.join(args.out, f"mt_{step:05d}"))

    if args.export:
        full = {n: {k: p.full_tensor() for k, p in w.items()} for n, w in (("student", w_student), ("teacher", w_teacher))}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
