"""DINO: sharded teacher, global and local crops of different length, centre over all ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.att = nn.LayerNorm(d), nn.MultiheadAttention(d, 2, bias=False, batch_first=True)
        self.n2, self.ff = nn.LayerNorm(d), nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        h = self.n1(x)
        x = x + self.att(h, h, h, need_weights=False)[0]
        return x + self.ff(self.n2(x))


class Vit(nn.Module):
    def __init__(self, patch=4, d=16, k=24):
        super().__init__()
        self.inp, self.blk, self.head = nn.Linear(patch, d), Block(d), nn.Linear(d, k)

    def forward(self, x):
        return self.head(self.blk(self.inp(x)).mean(1))


def crops(x, g, n, keep):
    """n crops: a random subset of the patches with noise; x holds the global batch."""
    out = []
    for _ in range(n):
        order = torch.rand(x.shape[:2], generator=g).argsort(1)[:, :keep]
        c = x.gather(1, order[..., None].expand(-1, -1, x.shape[2]))
        out.append(c + 0.1 * torch.randn(c.shape, generator=g))
    return out


def main():
    p = argparse.ArgumentParser()
    for name, default in (("steps", 30), ("batch", 32), ("save-every", 0)):
        p.add_argument("--" + name, type=int, default=default)
    for name in ("out", "resume", "export"):
        p.add_argument("--" + name, default="")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    student, teacher = Vit(), Vit()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    for m in (student, teacher):
        fully_shard(m.blk)
        fully_shard(m, reshard_after_forward=True)
    opt = torch.optim.AdamW(student.parameters(), lr=3e-3)
    centre = torch.zeros(24)

    def state(step):
        m, o = get_state_dict(student, opt)
        return {"student": m, "opt": o, "teacher": get_model_state_dict(teacher), "centre": centre, "step": step}

    start = 0
    if a.resume:
        st = state(0)
        dcp.load(st, checkpoint_id=os.path.join(a.resume, max(os.listdir(a.resume))))
        set_state_dict(student, opt, model_state_dict=st["student"], optim_state_dict=st["opt"])
        set_model_state_dict(teacher, st["teacher"])
        centre, start = st["centre"], st["step"]
    g0 = torch.Generator().manual_seed(6)
    proto = torch.randn(6, 16, 4, generator=g0)
    data = proto[torch.randint(0, 6, (384,), generator=g0)] + 0.3 * torch.randn(384, 16, 4, generator=g0)
    for step in range(start, a.steps):
        g = torch.Generator().manual_seed(step)
        x = data[torch.randint(0, len(data), (a.batch,), generator=g)]
        big = [c.chunk(world)[rank] for c in crops(x, g, 2, 12)]
        small = [c.chunk(world)[rank] for c in crops(x, g, 2, 5)]
        with torch.no_grad():
            t_out = teacher(torch.cat(big))
            target = [F.softmax((t - centre) / 0.07, -1) for t in t_out.chunk(2)]
        s_out = [*student(torch.cat(big)).chunk(2), *student(torch.cat(small)).chunk(2)]
        terms = [
            -(q * F.log_softmax(s / 0.2, -1)).sum(-1).mean()
            for i, q in enumerate(target)
            for j, s in enumerate(s_out)
            if i != j
        ]
        loss = sum(terms) / len(terms)
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            for s, t in zip(student.parameters(), teacher.parameters()):
                t.to_local().lerp_(s.to_local(), 0.05)
            mean = t_out.mean(0) / world
            dist.all_reduce(mean)
            centre = 0.9 * centre + 0.1 * mean
        log = loss.detach() / world
        dist.all_reduce(log)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {log.item():.5f}", flush=True)
        if a.save_every and (step + 1) % a.save_every == 0:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(a.out, f"{step + 1:05d}"))
    o = StateDictOptions(full_state_dict=True, cpu_offload=True)
    out = {**get_model_state_dict(student, options=o)}
    out.update({"t." + k: v for k, v in get_model_state_dict(teacher, options=o).items()})
    if rank == 0 and a.export:
        torch.save({**out, "centre": centre}, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
