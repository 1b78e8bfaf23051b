"""Distil a trained teacher into a small student; keep the best student by validation divergence and stop early.

Phase 1 trains the teacher on labels, phase 2 distils it. Both nets are sharded.
"""
import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

CLASSES, DIM = 8, 20


def net(width, depth):
    layers = [nn.Linear(DIM, width), nn.GELU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def shard(model):
    for m in model:
        if isinstance(m, nn.Linear):
            fully_shard(m)
    return fully_shard(model)


class Blobs:
    """Noisy class clusters bent through a fixed nonlinearity; a hard and noisy task, so the validation score is not monotone."""

    def __init__(self, seed=17):
        g = torch.Generator().manual_seed(seed)
        self.centers = 1.5 * torch.randn(CLASSES, DIM, generator=g)
        self.mix = torch.randn(DIM, DIM, generator=g) / DIM ** 0.5

    def batch(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(0, CLASSES, (n,), generator=g)
        x = self.centers[y] + 1.2 * torch.randn(n, DIM, generator=g)
        return torch.sin(x @ self.mix), y


class BestKeeper:
    """Keeps the sharded weights of the best evaluation so far in memory."""

    def __init__(self, model, patience):
        self.model, self.patience = model, patience
        self.best, self.bad, self.step, self.weights = float("inf"), 0, -1, None

    def offer(self, score, step):
        if score < self.best:
            self.best, self.bad, self.step = score, 0, step
            self.weights = copy.deepcopy(self.model.state_dict())
        else:
            self.bad += 1

    def exhausted(self):
        stop = torch.tensor(float(self.bad >= self.patience))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        return stop.item() > 0

    def restore(self):
        self.model.load_state_dict(self.weights)


class Distiller:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(4)
        self.teacher, self.student = shard(net(48, 3)), shard(net(16, 2))
        self.data = Blobs()

    def part(self, n, seed):
        x, y = self.data.batch(n, seed)
        k = n // self.world
        sl = slice(self.rank * k, (self.rank + 1) * k)
        return x[sl], y[sl]

    def train_teacher(self):
        opt = torch.optim.AdamW(self.teacher.parameters(), lr=3e-3)
        for step in range(self.args.teacher_steps):
            x, y = self.part(64, 1000 + step)
            F.cross_entropy(self.teacher(x), y).backward()
            opt.step()
            opt.zero_grad()
        self.teacher.requires_grad_(False).eval()

    def divergence(self, x, temp=2.0):
        with torch.no_grad():
            t = F.log_softmax(self.teacher(x) / temp, -1)
        s = F.log_softmax(self.student(x) / temp, -1)
        return F.kl_div(s, t, log_target=True, reduction="batchmean") * temp ** 2

    @torch.no_grad()
    def validate(self):
        x, _ = self.part(48, 77)
        self.student.eval()
        score = self.divergence(x)
        self.student.train()
        dist.all_reduce(score)
        return score.item() / self.world

    def distil(self):
        opt = torch.optim.SGD(self.student.parameters(), lr=0.35, momentum=0.9)
        keep = BestKeeper(self.student, self.args.patience)
        for step in range(self.args.steps):
            x, _ = self.part(16, 50_000 + step)
            loss = self.divergence(x)
            loss.backward()
            opt.step()
            opt.zero_grad()
            if (step + 1) % 2 == 0:
                score = self.validate()
                keep.offer(score, step + 1)
                if self.rank == 0:
                    print(f"step {step + 1} kd {loss.item():.5f} val {score:.5f} best {keep.best:.5f}@{keep.step}", flush=True)
                if keep.exhausted():
                    break
        keep.restore()
        return keep


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--teacher-steps", type=int, default=40)
    ap.add_argument("--steps", type=int, default=48)
    ap.add_argument("--patience", type=int, default=8)
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    d = Distiller(args)
    d.train_teacher()
    keep = d.distil()
    final = d.validate()
    if d.rank == 0:
        print(f"best student of step {keep.step}: val {final:.6f} loss {keep.best:.6f}")
    if args.export:
        sd = get_model_state_dict(d.student, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if d.rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
