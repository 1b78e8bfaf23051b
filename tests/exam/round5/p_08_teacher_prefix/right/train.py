import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from models import Classifier
from teacher import inputs, labels, load_teacher


def shard(net):
    for r in net.trunk:
        fully_shard(r)
    return fully_shard(net)


def kd_loss(s, t, y, temp, alpha):
    soft = F.kl_div(F.log_softmax(s / temp, -1), F.log_softmax(t / temp, -1), log_target=True, reduction="batchmean")
    return alpha * temp * temp * soft + (1 - alpha) * F.cross_entropy(s, y)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--teacher", default=os.path.join(tempfile.gettempdir(), "kd_teacher_v1.pt"))
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--temp", type=float, default=2.0)
    ap.add_argument("--alpha", type=float, default=0.8)
    ap.add_argument("--export", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    teacher = shard(load_teacher(a.teacher))
    torch.manual_seed(1)
    student = shard(Classifier(d=16, depth=1))
    opt = torch.optim.AdamW(student.parameters(), lr=a.lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, a.lr, total_steps=a.steps)
    for step in range(a.steps):
        x = inputs(a.batch, 20_000 + step).chunk(world)[rank]
        with torch.no_grad():
            t = teacher(x)
        loss = kd_loss(student(x), t, labels(x), a.temp, a.alpha)
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        s = loss.detach().clone()
        dist.all_reduce(s)
        if rank == 0:
            print(f"step {step + 1} loss {s.item() / world:.4f}", flush=True)
    x = inputs(512, 99).chunk(world)[rank]
    with torch.no_grad():
        acc = (student(x).argmax(1) == labels(x)).float().sum()
    dist.all_reduce(acc)
    full = {k: v.full_tensor() for k, v in student.state_dict().items()} if a.export else None
    if rank == 0:
        print(f"student accuracy {acc.item() / 512:.3f}")
        if a.export:
            torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
