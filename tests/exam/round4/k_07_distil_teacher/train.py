"""Distillation of a small LM from a larger one; student and teacher are both sharded."""
import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from corpus import VOCAB, sample
from model import Llamalet
from teacher import load_teacher, make_teacher_file


def wrap(net, mesh, **kw):
    for layer in net.layers:
        fully_shard(layer, mesh=mesh, **kw)
    return fully_shard(net, mesh=mesh, **kw)


def kd_loss(student_logits, teacher_logits, labels, temperature, alpha):
    t = temperature
    kl = F.kl_div(F.log_softmax(student_logits / t, -1), F.log_softmax(teacher_logits / t, -1),
                  log_target=True, reduction="batchmean") * t * t
    ce = F.cross_entropy(student_logits, labels)
    return alpha * kl + (1 - alpha) * ce, kl.detach(), ce.detach()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=6e-3)
    ap.add_argument("--alpha", type=float, default=0.5)
    ap.add_argument("--temperature", type=float, default=2.0)
    ap.add_argument("--teacher", default=None)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    where = [args.teacher or os.path.join(tempfile.mkdtemp(), "teacher.pt")]
    dist.broadcast_object_list(where, src=0)
    if rank == 0 and not os.path.exists(where[0]):
        make_teacher_file(where[0])
    dist.barrier()

    torch.manual_seed(2)
    teacher = wrap(load_teacher(where[0]), mesh)
    torch.manual_seed(8)
    student = wrap(Llamalet(VOCAB, dim=16, heads=2, depth=1), mesh)
    opt = torch.optim.AdamW(student.parameters(), lr=args.lr, betas=(0.9, 0.95))
    sched = torch.optim.lr_scheduler.LinearLR(opt, 0.2, 1.0, total_iters=4)

    per = args.batch // world
    for step in range(1, args.steps + 1):
        rows = sample(args.batch, 25, seed=step)[rank * per:(rank + 1) * per]
        ids, labels = rows[:, :-1], rows[:, 1:].flatten()
        with torch.no_grad():
            goal = teacher(ids).flatten(0, 1)
        loss, kl, ce = kd_loss(student(ids).flatten(0, 1), goal, labels, args.temperature, args.alpha)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        log = torch.stack([loss.detach(), kl, ce]) / world
        dist.all_reduce(log)
        if rank == 0 and step % 4 == 0:
            print("step {:3d} loss {:.4f} kl {:.4f} ce {:.4f}".format(step, *log.tolist()), flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
