"""Train a small teacher, cut it down to every second layer and distil it into the rest."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F

from build import build_student, build_teacher
from nets import NetConfig

TEMPERATURE = 2.0


def batch(step, cfg, size, rank, world):
    """Noisy arithmetic progressions; the split over the ranks does not change the global batch."""
    g = torch.Generator().manual_seed(31 + step)
    start = torch.randint(0, cfg.vocab, (size, 1), generator=g)
    stride = torch.randint(1, 4, (size, 1), generator=g)
    ids = (start + stride * torch.arange(cfg.length + 1)) % cfg.vocab
    noise = torch.rand(ids.shape, generator=g) < 0.03
    ids = torch.where(noise, torch.randint(0, cfg.vocab, ids.shape, generator=g), ids)
    ids = ids[rank::world]
    return ids[:, :-1], ids[:, 1:]


def global_mean(value, world):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / world


def train_teacher(teacher, args, rank, world):
    optimizer = torch.optim.Adam(teacher.parameters(), lr=args.teacher_lr, eps=1e-6)
    for step in range(args.teacher_steps):
        x, y = batch(step, teacher.cfg, args.batch, rank, world)
        loss = F.cross_entropy(teacher(x).flatten(0, 1), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        print(f"teacher: loss {loss.item():.4f} after {args.teacher_steps} steps")
    teacher.requires_grad_(False)
    teacher.eval()


def distil(student, teacher, args, rank, world):
    optimizer = torch.optim.Adam(student.parameters(), lr=args.lr, eps=1e-6)
    for step in range(args.steps):
        x, y = batch(10_000 + step, student.cfg, args.batch, rank, world)
        with torch.no_grad():
            soft = F.log_softmax(teacher(x) / TEMPERATURE, -1)
        logits = student(x)
        kd = F.kl_div(F.log_softmax(logits / TEMPERATURE, -1).flatten(0, 1), soft.flatten(0, 1),
                      reduction="batchmean", log_target=True) * TEMPERATURE ** 2
        ce = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss = args.alpha * kd + (1 - args.alpha) * ce
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 2.0)
        optimizer.step()
        optimizer.zero_grad()
        kd_mean, ce_mean = global_mean(kd, world), global_mean(ce, world)
        if rank == 0:
            print(f"step {step + 1:2d} kd {kd_mean:.4f} ce {ce_mean:.4f}")


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--teacher-steps", type=int, default=60)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--teacher-lr", type=float, default=5e-3)
    p.add_argument("--alpha", type=float, default=0.7)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    teacher = build_teacher(NetConfig(), seed=0)
    train_teacher(teacher, args, rank, world)
    student = build_student(teacher, keep=[0, 2], seed=1)
    distil(student, teacher, args, rank, world)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
