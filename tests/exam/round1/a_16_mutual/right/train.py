"""Deep mutual learning: two different classifiers are trained together, each also matches the other's (detached) softened
predictions. Two FSDP models, two optimizers, one backward; the label loss fades in favour of the peer loss.

    torchrun --standalone --nproc-per-node 2 train.py --save-every 4 --out ckpt
"""

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
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, CLASSES = 24, 10, 5


class BagNet(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, d, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def forward(self, ids):
        return self.mlp(self.bag(ids))


class ConvNet(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.convs = nn.ModuleList(nn.Conv1d(d, d, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))
        self.head = nn.Linear(d, CLASSES)

    def forward(self, ids):
        x = self.emb(ids)
        for conv, norm in zip(self.convs, self.norms):
            x = x + F.gelu(conv(norm(x).transpose(1, 2))).transpose(1, 2)
        return self.head(x.amax(1))


class Member(Stateful):
    """A model with its optimizer."""

    def __init__(self, model, opt):
        self.model, self.opt = model, opt

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])


class Clock(Stateful):
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, sd):
        self.step = sd["step"]


def data(n, seed):
    """Class c: tokens c..c+7 are twice as likely, and the pair (c, c + 1) occurs side by side."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    ids = torch.randint(0, VOCAB, (n, SEQ), generator=g)
    lean = torch.rand(n, SEQ, generator=g) < 0.3
    ids = torch.where(lean, (4 * y[:, None] + torch.randint(0, 8, (n, SEQ), generator=g)) % VOCAB, ids)
    at = torch.randint(0, SEQ - 1, (n,), generator=g)
    ids[torch.arange(n), at], ids[torch.arange(n), at + 1] = 4 * y, 4 * y + 1
    return ids, y


def peer_kl(student, teacher, temp):
    p = F.softmax(teacher.detach() / temp, -1)
    return F.kl_div(F.log_softmax(student / temp, -1), p, reduction="batchmean") * temp**2


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--temp", type=float, default=2.0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(30)
    bag, conv = BagNet(), ConvNet()
    fully_shard(bag)
    for c in conv.convs:
        fully_shard(c)
    fully_shard(conv)
    team = {
        "bag": Member(bag, torch.optim.Adam(bag.parameters(), lr=1e-2)),
        "conv": Member(conv, torch.optim.SGD(conv.parameters(), lr=0.1, momentum=0.9, nesterov=True)),
        "clock": (clock := Clock()),
    }
    if args.resume:
        dcp.load(team, checkpoint_id=os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]))

    ids, y = data(480, 1)
    while clock.step < args.steps:
        pick = torch.randperm(480, generator=torch.Generator().manual_seed(clock.step))[: args.batch].chunk(world)[rank]
        a, b = bag(ids[pick]), conv(ids[pick])
        w = 0.5 * clock.step / args.steps
        la, lb = F.cross_entropy(a, y[pick]), F.cross_entropy(b, y[pick])
        loss = (1 - w) * (la + lb) + w * (peer_kl(a, b, args.temp) + peer_kl(b, a, args.temp))
        loss.backward()
        for member in (team["bag"], team["conv"]):
            nn.utils.clip_grad_norm_(member.model.parameters(), 1.0)
            member.opt.step()
            member.opt.zero_grad()
        clock.step += 1
        shown = torch.stack([la, lb]).detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {clock.step} loss bag {shown[0]:.4f} conv {shown[1]:.4f} peer weight {w:.2f}", flush=True)
        if args.save_every and clock.step % args.save_every == 0:
            dcp.save(team, checkpoint_id=os.path.join(args.out, f"at{clock.step:05d}"))

    if args.export:
        opts = StateDictOptions(full_state_dict=True, cpu_offload=True)
        out = {k: get_model_state_dict(team[k].model, options=opts) for k in ("bag", "conv")}
        if rank == 0:
            torch.save(out, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
