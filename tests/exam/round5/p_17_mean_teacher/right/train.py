import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict

from data import SemiSupervised
from nets import build, follow


def pack(student, teacher, opt):
    m, o = get_state_dict(student, opt)
    return {"student": m, "teacher": get_model_state_dict(teacher), "optim": o}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--labelled", type=int, default=16)
    ap.add_argument("--unlabelled", type=int, default=32)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="mt")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = SemiSupervised()
    student, teacher = build(4), build(4)
    teacher.requires_grad_(False)
    opt = torch.optim.AdamW(student.parameters(), lr=a.lr)
    start = 0
    if a.resume:
        start = max(int(d.removeprefix("mt-")) for d in os.listdir(a.resume) if d.startswith("mt-"))
        sd = pack(student, teacher, opt)
        dcp.load(sd, checkpoint_id=os.path.join(a.resume, f"mt-{start}"))
        set_state_dict(student, opt, model_state_dict=sd["student"], optim_state_dict=sd["optim"])
        set_model_state_dict(teacher, sd["teacher"])
    for step in range(start, a.steps):
        x, y, v1, v2 = data.draw(step, a.labelled, a.unlabelled, rank, world)
        with torch.no_grad():
            target = teacher(v2).softmax(-1)
        out = student(torch.cat([x, v1]))
        sup = F.cross_entropy(out[: len(x)], y)
        con = F.mse_loss(out[len(x):].softmax(-1), target)
        loss = sup + min(1.0, step / 15) * 5.0 * con
        loss.backward()
        opt.step()
        opt.zero_grad()
        follow(teacher, student, min(0.95, 1 - 1 / (step + 2)))
        s = torch.stack([sup.detach(), con.detach()])
        dist.all_reduce(s)
        if rank == 0:
            sup, con = (s / world).tolist()
            print(f"step {step + 1} loss {sup:.4f} consistency {con:.5f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(pack(student, teacher, opt), checkpoint_id=os.path.join(a.out, f"mt-{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
