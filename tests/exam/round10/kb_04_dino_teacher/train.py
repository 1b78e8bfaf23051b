"""DINO self-distillation with a momentum teacher; both networks are sharded."""
import argparse
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from loss import DinoLoss
from vit import DinoViT

STEPS, BATCH, SIZE, LR, SEED = 24, 16, 16, 2e-3, 11


def make_images(n):
    g = torch.Generator().manual_seed(SEED)
    coarse = torch.randn(n, 3, 4, 4, generator=g)
    return torch.nn.functional.interpolate(coarse, size=(SIZE, SIZE), mode="bilinear") + 0.05 * torch.randn(n, 3, SIZE, SIZE, generator=g)


def crops(images, step):
    """Two random views of the global batch of this step."""
    g = torch.Generator().manual_seed(SEED * 100_000 + step)
    idx = torch.randint(len(images), (BATCH,), generator=g)
    views = []
    for _ in range(2):
        dy, dx = torch.randint(-3, 4, (2,), generator=g).tolist()
        gain = 0.8 + 0.4 * torch.rand(BATCH, 3, 1, 1, generator=g)
        noise = 0.1 * torch.randn(BATCH, 3, SIZE, SIZE, generator=g)
        views.append(images[idx].roll((dy, dx), (2, 3)) * gain + noise)
    return views


def shard(model, dtype=None):
    for block in model.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    root = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
    return fully_shard(model, mp_policy=root, reshard_after_forward=True)


@torch.no_grad()
def update_teacher(teacher, student, m):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.to_local().lerp_(s.to_local().to(t.dtype), 1 - m)


def teacher_momentum(step, base=0.96):
    return 1 - (1 - base) * (math.cos(math.pi * step / STEPS) + 1) / 2


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--dir", default="ckpt")
    ap.add_argument("--resume", action="store_true")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(SEED)
    student = DinoViT()
    teacher = copy.deepcopy(student)
    teacher.requires_grad_(False)
    # the teacher only runs forward: compute it in bfloat16
    shard(student)
    shard(teacher, torch.bfloat16)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR, weight_decay=0.04)
    criterion = DinoLoss(48)
    images = make_images(256)

    def state_dict():
        return {"student": get_model_state_dict(student), "teacher": get_model_state_dict(teacher),
                "optimizer": get_optimizer_state_dict(student, optimizer), "center": criterion.center, "step": step}

    step = 0
    if args.resume:
        newest = sorted(d for d in os.listdir(args.dir) if d.startswith("step"))[-1]
        sd = state_dict()
        dcp.load(sd, checkpoint_id=os.path.join(args.dir, newest))
        set_model_state_dict(student, sd["student"])
        set_model_state_dict(teacher, sd["teacher"])
        set_optimizer_state_dict(student, optimizer, sd["optimizer"])
        criterion.center, step = sd["center"], sd["step"]

    while step < STEPS:
        a, b = (v[rank * BATCH // world:(rank + 1) * BATCH // world] for v in crops(images, step))
        x = torch.cat([a, b])
        with torch.no_grad():
            target = teacher(x)
        loss = criterion(student(x), target)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        optimizer.step()
        update_teacher(teacher, student, teacher_momentum(step))
        step += 1
        dist.all_reduce(value := loss.detach().clone())
        if rank == 0:
            print(f"step {step} loss {value.item() / world:.4f}")
        if args.save_every and step % args.save_every == 0:
            dcp.save(state_dict(), checkpoint_id=os.path.join(args.dir, f"step{step:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
