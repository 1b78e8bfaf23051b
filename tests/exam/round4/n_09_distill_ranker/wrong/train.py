"""Listwise distillation of a large ranker into a small one."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distiller import Distiller, Scorer, train_teacher
from queries import make_queries

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


@torch.no_grad()
def pair_accuracy(student, x, y):
    s = student(x)
    want, got = y[:, :, None] > y[:, None, :], s[:, :, None] > s[:, None, :]
    return (want & got).sum().item() / want.sum().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--eval-every", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/rank")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    x, y = make_queries(256)
    x_dev, y_dev = make_queries(64, seed=2)
    teacher = train_teacher(x, y)  # the same on every rank; stands for a file of weights
    distiller = Distiller(teacher, Scorer(x.shape[-1], 24, 1))

    mesh = init_device_mesh("cpu", (world,))
    for lin in distiller.teacher.layers:
        fully_shard(lin, mesh=mesh)
    fully_shard(distiller.teacher, mesh=mesh)
    fully_shard(distiller.student, mesh=mesh)
    student = distiller.student
    opt = torch.optim.AdamW(student.parameters(), lr=0.01)

    step = 0
    if args.resume:
        ck = torch.load(os.path.join(args.resume, max(os.listdir(args.resume))), weights_only=True)
        set_state_dict(student, opt, model_state_dict=ck["student"], optim_state_dict=ck["opt"],
                       options=StateDictOptions(full_state_dict=True))
        step = ck["step"]

    student.train()
    while step < args.steps:
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(step))[:args.batch].chunk(world)[rank]
        loss = distiller(x[rows])
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        dist.all_reduce(loss.detach_())
        if step % args.eval_every == 0:
            distiller.eval()
            acc = pair_accuracy(student, x_dev, y_dev)
            distiller.train()
            if rank == 0:
                print(f"step {step} kd {loss.item() / world:.4f} pair acc {acc:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(student, opt, options=FULL)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"student": m, "opt": o, "step": step}, f"{args.out}/kd-{step:05d}.pt")
            dist.barrier()

    if args.export:
        weights = {k: v.full_tensor() for k, v in student.state_dict().items()}
        if rank == 0:
            torch.save({"student": weights, "teacher_stats": [n.running_mean.clone() for n in distiller.teacher.norms]}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
