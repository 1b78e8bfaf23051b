import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from data import batches

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def pretrain_teacher(teacher, x, y, steps=60):
    opt = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for s in range(steps):
        idx = torch.randint(0, len(x), (64,), generator=torch.Generator().manual_seed(s))
        loss = F.cross_entropy(teacher(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
    return teacher


class Engine:
    def __init__(self, distiller, opt, sched, train, val, args):
        self.distiller, self.opt, self.sched = distiller, opt, sched
        self.train_set, self.val_set, self.args = train, val, args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step = 0

    @torch.no_grad()
    def evaluate(self):
        distiller = self.distiller
        distiller.eval()
        x, y = (t[self.rank :: self.world] for t in self.val_set)
        s, t = distiller.student(x).argmax(-1), distiller.teacher(x).argmax(-1)
        c = torch.tensor([(s == y).sum().item(), (t == y).sum().item(), len(y)], dtype=torch.float64)
        dist.all_reduce(c)
        distiller.train()
        return (c[0] / c[2]).item(), (c[1] / c[2]).item()

    def fit(self):
        n = len(self.train_set[0])
        per_epoch = n // self.args.batch
        while self.step < self.args.steps:
            epoch, skip = divmod(self.step, per_epoch)
            for i, idx in enumerate(batches(n, self.args.batch, epoch, self.rank, self.world)):
                if i < skip:
                    continue
                if self.step >= self.args.steps:
                    break
                self.train_step(idx)
                if self.step % self.args.eval_every == 0:
                    s, t = self.evaluate()
                    if self.rank == 0:
                        print(f"  eval: student {s:.3f} teacher {t:.3f}", flush=True)
                if self.args.save_every and self.step % self.args.save_every == 0:
                    self.save()

    def train_step(self, idx):
        x, y = self.train_set
        loss = self.distiller(x[idx], y[idx])
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        self.sched.step()
        self.step += 1
        if self.rank == 0 and self.step % 2 == 0:
            print(f"step {self.step} kd loss {loss.item():.4f}", flush=True)

    def save(self):
        m, o = get_state_dict(self.distiller.student, self.opt, options=FULL)
        if self.rank == 0:
            os.makedirs(self.args.out, exist_ok=True)
            torch.save(
                {"student": m, "opt": o, "sched": self.sched.state_dict(), "step": self.step},
                os.path.join(self.args.out, f"ckpt_{self.step:05d}.pt"),
            )
        dist.barrier()

    def load(self, folder):
        newest = sorted(f for f in os.listdir(folder) if f.startswith("ckpt_"))[-1]
        ck = torch.load(os.path.join(folder, newest), weights_only=False)
        set_state_dict(
            self.distiller.student, self.opt, model_state_dict=ck["student"], optim_state_dict=ck["opt"], options=FULL
        )
        self.sched.load_state_dict(ck["sched"])
        self.step = ck["step"]
