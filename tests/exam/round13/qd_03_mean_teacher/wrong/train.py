"""Semi-supervised mean teacher on two interleaved spirals with few labels."""
import os
from argparse import ArgumentParser
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, mse_loss


@dataclass
class Config:
    steps: int = 16
    labelled: int = 16
    unlabelled: int = 32
    width: int = 32
    lr: float = 2e-3
    decay: float = 0.99
    weight: float = 4.0
    seed: int = 3


class Classifier(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.mid = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        x = x.to(self.stem.weight.dtype)
        h = torch.tanh(self.stem(x))
        return self.out(h + self.mid(h)).float()


def spirals(n, g):
    y = torch.randint(0, 2, (n,), generator=g)
    r = torch.rand(n, generator=g) * 2 + 0.3
    a = r * 2.2 + y * torch.pi
    p = torch.stack([r * a.cos(), r * a.sin()], 1)
    return torch.cat([p, p.sin(), (2 * p).cos(), p**2 / 4], 1), y


def sharded(net):
    fully_shard(net.mid)
    return fully_shard(net, reshard_after_forward=True)


@torch.no_grad()
def follow(teacher, student, decay):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.add_(s - t, alpha=1 - decay)


@torch.no_grad()
def accuracy(net, seed, rank, world):
    x, y = spirals(256, torch.Generator().manual_seed(seed))
    hits = (net(x[rank::world]).argmax(-1) == y[rank::world]).sum()
    dist.all_reduce(hits)
    return hits.item() / 256


def main():
    ap = ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    ap.add_argument("--decay", type=float, default=Config.decay)
    a = ap.parse_args()
    cfg = Config(decay=a.decay)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.seed)
    student = Classifier(cfg.width)
    teacher = deepcopy(student).to(torch.bfloat16).requires_grad_(False)
    student, teacher = sharded(student), sharded(teacher)
    opt = torch.optim.AdamW(student.parameters(), lr=cfg.lr, weight_decay=0.01)

    step = 0
    if a.resume:
        ms, os_ = get_state_dict(student, opt)
        sd = {"student": ms, "optim": os_, "teacher": get_model_state_dict(teacher), "step": torch.tensor(0)}
        dcp.load(sd, checkpoint_id=os.path.join(a.resume, max(os.listdir(a.resume))))
        set_state_dict(student, opt, model_state_dict=sd["student"], optim_state_dict=sd["optim"])
        set_model_state_dict(teacher, sd["teacher"])
        step = int(sd["step"])

    while step < cfg.steps:
        g = torch.Generator().manual_seed(cfg.seed + 1 + step)
        x, y = spirals(cfg.labelled, g)
        u, _ = spirals(cfg.unlabelled, g)
        n1 = 0.05 * torch.randn(u.shape, generator=g)
        n2 = 0.05 * torch.randn(u.shape, generator=g)
        x, y, u1, u2 = (t[rank::world] for t in (x, y, u + n1, u + n2))
        with torch.no_grad():
            goal = teacher(u2).softmax(-1)
        logits = student(torch.cat([x, u1]))
        sup = cross_entropy(logits[: len(x)], y)
        con = mse_loss(logits[len(x):].softmax(-1), goal)
        loss = sup + cfg.weight * con
        opt.zero_grad()
        loss.backward()
        opt.step()
        follow(teacher, student, cfg.decay)
        step += 1
        if step % 5 == 0 or step in (1, cfg.steps):
            m = torch.stack([loss.detach(), sup.detach(), con.detach()])
            dist.all_reduce(m)
            acc = accuracy(teacher, 99, rank, world)
            if rank == 0:
                print("step %d loss %.4f sup %.4f consistency %.5f teacher acc %.4f" % (step, *(m / world).tolist(), acc), flush=True)
        if a.out and a.save_every and step % a.save_every == 0:
            ms, os_ = get_state_dict(student, opt)
            dcp.save({"student": ms, "optim": os_, "teacher": get_model_state_dict(teacher), "step": torch.tensor(step)},
                     checkpoint_id=os.path.join(a.out, f"ck{step:04d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
