"""BYOL: an online encoder with a predictor learns to match a momentum encoder's view of the same sample."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from nets import build

IN_DIM = 24


def two_views(step, batch):
    """Samples on a low-dimensional surface; a view hides a part of the inputs and adds noise."""
    g = torch.Generator().manual_seed(70_000 + step)
    basis = torch.randn(4, IN_DIM, generator=torch.Generator().manual_seed(1))
    x = torch.tanh(torch.randn(batch, 4, generator=g) @ basis)
    out = []
    for _ in range(2):
        keep = (torch.rand(batch, IN_DIM, generator=g) > 0.2).float()
        out.append(x * keep + 0.1 * torch.randn(batch, IN_DIM, generator=g))
    return out


def regression_loss(p, z):
    return (2 - 2 * F.cosine_similarity(p, z, dim=-1)).mean()


@torch.no_grad()
def momentum_update(pairs, m):
    for t, s in pairs:
        t.mul_(m).add_(s, alpha=1 - m)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--momentum", type=float, default=0.9)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    student, predictor, teacher = build()
    opts = {"student": torch.optim.AdamW(student.parameters(), lr=3e-3),
            "predictor": torch.optim.AdamW(predictor.parameters(), lr=1e-2)}
    pairs = list(zip(teacher.parameters(), student.parameters()))
    nets = {"student": student, "predictor": predictor, "teacher": teacher}

    def snapshot(step):
        st = {k: m.state_dict() for k, m in nets.items()}
        for k, o in opts.items():
            st[f"opt_{k}"] = get_optimizer_state_dict(nets[k], o)
        st["step"] = step
        return st

    start = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda d: int(d))
        st = snapshot(0)
        dcp.load(st, checkpoint_id=os.path.join(args.resume, newest))
        for k, m in nets.items():
            m.load_state_dict(st[k])
        for k, o in opts.items():
            set_optimizer_state_dict(nets[k], o, st[f"opt_{k}"])
        start = st["step"]

    n = args.batch // world
    mine = slice(rank * n, (rank + 1) * n)
    for step in range(start, args.steps):
        v1, v2 = (v[mine] for v in two_views(step, args.batch))
        with torch.no_grad():
            z1, z2 = teacher(v1), teacher(v2)
        p = predictor(student(torch.cat([v1, v2])))
        loss = regression_loss(p[:n], z2) + regression_loss(p[n:], z1)
        loss.backward()
        for o in opts.values():
            o.step()
            o.zero_grad()
        m = 1 - (1 - args.momentum) * (math.cos(math.pi * step / args.steps) + 1) / 2
        momentum_update(pairs, m)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {mean.item():.5f} m {m:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(step + 1), checkpoint_id=os.path.join(args.out, str(step + 1)))

    if args.export:
        out = {k: {n: v.full_tensor() for n, v in m.state_dict().items()} for k, m in nets.items()}
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
