"""DINO self-distillation with FSDP2 (student and teacher are both sharded)."""
import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dino_loss import DINOLoss
from vit import ViTWithHead

STEPS, BATCH, OUT = 20, 32, 64


def make_batch(step, rank, world):
    g = torch.Generator().manual_seed(9000 + step)
    proto = torch.randn(10, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    # the images come from shards ordered by class, so neighbours look alike
    label = torch.sort(torch.randint(0, 10, (BATCH,), generator=g)).values
    x = proto[label]
    views = []
    for _ in range(3):
        jitter = 0.8 + 0.4 * torch.rand(BATCH, 3, 1, 1, generator=g)
        views.append(x * jitter + 0.4 * torch.randn(x.shape, generator=g))
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    return [v[mine] for v in views]


def shard(model, mesh):
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


@torch.no_grad()
def update_teacher(teacher, student, m):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.mul_(m).add_(s, alpha=1 - m)


def cosine(a, b, step):
    return b + 0.5 * (a - b) * (1 + math.cos(math.pi * step / STEPS))


def build_state(student, teacher, opt, criterion, step):
    return {"student": get_model_state_dict(student), "teacher": get_model_state_dict(teacher),
            "optim": get_optimizer_state_dict(student, opt), "loss": criterion.state_dict(), "step": step}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="ckpt")
    p.add_argument("--resume")
    p.add_argument("--export")
    a = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(0)
    student = ViTWithHead(out=OUT)
    teacher = copy.deepcopy(student).requires_grad_(False)
    student, teacher = shard(student, mesh), shard(teacher, mesh)
    criterion = DINOLoss(OUT)
    decay = [q for q in student.parameters() if q.ndim > 1]
    plain = [q for q in student.parameters() if q.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay}, {"params": plain, "weight_decay": 0.0}], lr=2e-3, eps=1e-6)

    first = 0
    if a.resume:
        newest = max(os.listdir(a.resume), key=lambda n: int(n.split("-")[1]))
        state = build_state(student, teacher, opt, criterion, 0)
        dcp.load(state, checkpoint_id=os.path.join(a.resume, newest))
        set_model_state_dict(student, state["student"])
        set_model_state_dict(teacher, state["teacher"])
        set_optimizer_state_dict(student, opt, state["optim"])
        criterion.load_state_dict(state["loss"])
        first = state["step"]

    for step in range(first, STEPS):
        for group in opt.param_groups:
            group["lr"] = cosine(2e-3, 1e-4, step) * min(1.0, (step + 1) / 4)
        opt.param_groups[0]["weight_decay"] = cosine(0.04, 0.4, step)

        views = make_batch(step, rank, world)
        with torch.no_grad():
            t_out = list(teacher(torch.cat(views[:2])).chunk(2))
        s_out = list(student(torch.cat(views)).chunk(3))
        loss = criterion(s_out, t_out)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        opt.step()
        opt.zero_grad()
        update_teacher(teacher, student, cosine(0.9, 1.0, step))

        log = loss.detach().clone()
        dist.all_reduce(log)
        if rank == 0:
            print(f"step {step + 1} loss {log.item() / world:.4f}")
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(build_state(student, teacher, opt, criterion, step + 1),
                     checkpoint_id=os.path.join(a.out, f"step-{step + 1}"))

    if a.export:
        opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
        s, t = get_model_state_dict(student, options=opts), get_model_state_dict(teacher, options=opts)
        if rank == 0:
            torch.save({"student": s, "teacher": t, "center": criterion.center}, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
