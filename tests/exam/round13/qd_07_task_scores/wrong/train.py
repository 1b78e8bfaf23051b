"""Multi-task classification; tasks that do badly in validation get more weight in the next period."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from metrics import task_accuracy
from tasks import CLASSES, TaskMixture

TASKS, DIM = 4, 8


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.task = nn.Embedding(TASKS, width)
        self.inp = nn.Linear(DIM, width)
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.heads = nn.Parameter(torch.randn(TASKS, width, CLASSES) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(TASKS, CLASSES))

    def forward(self, x, t):
        h = F.gelu(self.inp(x) + self.task(t))
        return torch.einsum("nw,nwc->nc", h + self.body(h), self.heads[t]) + self.bias[t]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--period", type=int, default=4)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--out", default="run")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", default="")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(31)
    model = Net(24)
    fully_shard(model.body)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=8e-3)
    mix = TaskMixture(TASKS, DIM, seed=77)
    valid = mix.draw(90, 999_999, odds=torch.tensor([6.0, 3.0, 1.0, 1.0]))
    weight, step = torch.ones(TASKS), 0

    def state():
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "task_weight": weight, "step": torch.tensor(step)}

    if a.resume:
        s = state()
        dcp.load(s, checkpoint_id=os.path.join(a.resume, max(os.listdir(a.resume))))
        set_state_dict(model, opt, model_state_dict=s["model"], optim_state_dict=s["opt"])
        weight, step = s["task_weight"], int(s["step"])

    while step < a.steps:
        x, y, t = (v[rank::world] for v in mix.draw(a.batch, step))
        loss = (weight[t] * F.cross_entropy(model(x, t), y, reduction="none")).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % a.period == 0:
            acc = task_accuracy(model, valid, TASKS, rank, world)
            weight = (1.05 - acc).pow(1.5)
            weight = TASKS * weight / weight.sum()
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.4f} macro accuracy {acc.mean():.4f} per task", [round(v, 3) for v in acc.tolist()], flush=True)
        if a.save_every and step % a.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(a.out, f"{step:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
