"""Distillation from cached teacher logits.

The teacher is run once over the data set (each rank does its part, the logits are gathered) and then
thrown away; the student trains on the cache with hint features, EMA weights and a restartable stream.
"""

import argparse
import itertools
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

CLASSES, DIM = 6, 30


def build_teacher(x, y):
    torch.manual_seed(1000)
    t = nn.Sequential(
        nn.Linear(DIM, 96), nn.ReLU(), nn.Linear(96, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, CLASSES)
    )
    opt = torch.optim.Adam(t.parameters(), lr=3e-3)
    for s in range(80):
        idx = torch.randint(0, len(x), (64,), generator=torch.Generator().manual_seed(s))
        loss = F.cross_entropy(t(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return t.eval()


@torch.no_grad()
def build_cache(teacher, x, rank, world):
    """Logits and penultimate features for every sample, in the order of the data set."""
    per = math.ceil(len(x) / world)
    part = x[rank * per : (rank + 1) * per]
    feats = teacher[:4](part)
    both = torch.cat([teacher[4:](feats), feats], 1)
    both = F.pad(both, (0, 0, 0, per - len(both)))
    full = torch.empty(per * world, both.shape[1])
    dist.all_gather_into_tensor(full, both.contiguous())
    return full[: len(x)].split([CLASSES, 32], dim=1)


class Student(nn.Module):
    def __init__(self, w=24):
        super().__init__()
        self.inp = nn.Linear(DIM, w)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(w), nn.Linear(w, w), nn.GELU()) for _ in range(2))
        self.fc = nn.Linear(w, CLASSES)
        self.hint = nn.Linear(w, 32)  # only for training, not exported

    def forward(self, x):
        h = self.inp(x)
        for b in self.blocks:
            h = h + b(h)
        return self.fc(h), self.hint(h)


def index_stream(n, batch):
    """Infinite; every sample once per epoch, the ragged end of an epoch is joined to the next one."""

    def singles():
        for epoch in itertools.count():
            yield from torch.randperm(n, generator=torch.Generator().manual_seed(epoch)).tolist()

    it = singles()
    while True:
        yield torch.tensor(list(itertools.islice(it, batch)))


def table(n, seed):
    g, wg = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(55)
    x = torch.randn(n, DIM, generator=g)
    logits = (x @ torch.randn(DIM, 20, generator=wg)).tanh() @ torch.randn(20, CLASSES, generator=wg)
    return x, logits.argmax(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=35)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--tau", type=float, default=2.0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="kdcache")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = table(1001, 1)
    t_logits, t_feats = build_cache(build_teacher(x, y), x, rank, world)

    torch.manual_seed(30)
    model = Student()
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    names, params = zip(*model.named_parameters())
    opt = torch.optim.NAdam(params, lr=4e-3)
    average = {n: p.detach().clone() for n, p in zip(names, params)}

    first = 0
    if args.resume:
        first = max(int(n.split("=")[1]) for n in os.listdir(args.resume))
        m, o = get_state_dict(model, opt)
        tree = {"student": m, "optim": o, "average": average}
        dcp.load(tree, checkpoint_id=os.path.join(args.resume, f"step={first}"))
        set_state_dict(model, opt, model_state_dict=tree["student"], optim_state_dict=tree["optim"])

    stream = itertools.islice(enumerate(index_stream(len(x), args.batch)), first, args.steps)
    for step, idx in stream:
        idx = idx.chunk(world)[rank]
        lr = 4e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * step / args.steps)))
        hint_weight = max(0.0, 1 - step / (0.6 * args.steps))
        for group in opt.param_groups:
            group["lr"] = lr
        logits, hint = model(x[idx])
        kd = (
            F.kl_div(F.log_softmax(logits / args.tau, 1), F.softmax(t_logits[idx] / args.tau, 1), reduction="batchmean")
            * args.tau**2
        )
        loss = kd + 0.2 * F.cross_entropy(logits, y[idx]) + hint_weight * F.mse_loss(hint, t_feats[idx])
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            decay = min(0.95, (1 + step) / (10 + step))
            for n, p in zip(names, params):
                average[n].lerp_(p, 1 - decay)
        done = step + 1
        shown = torch.stack([kd.detach(), loss.detach()])
        dist.all_reduce(shown)
        if rank == 0 and done % 5 == 0:
            print(f"step {done} kd {shown[0].item() / world:.4f} total {shown[1].item() / world:.4f}", flush=True)
        if args.save_every and done % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save(
                {"student": m, "optim": o, "average": average}, checkpoint_id=os.path.join(args.out, f"step={done}")
            )

    if args.export:
        full = {n: a.full_tensor() for n, a in average.items() if not n.startswith("hint")}
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
