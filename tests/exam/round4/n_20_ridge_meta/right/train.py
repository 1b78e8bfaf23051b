"""Meta-learning with a closed-form inner solver (R2-D2): few-shot regression on random sinusoids.

The module's forward takes whole tasks. It embeds the support set, solves a ridge regression and predicts the queries,
so that the outer gradient runs through the solver and no inner loop over parameters is needed. Ranks share the tasks.
"""
import argparse
import contextlib
import os
import signal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Embed(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.a, self.b = nn.Linear(1, width), nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.b(torch.tanh(self.a(x))))


class RidgeLearner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = Embed()
        self.log_lam = nn.Parameter(torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, xs, ys, xq):
        fs, fq = self.embed(xs), self.embed(xq)  # [tasks, shots, width]
        # Woodbury: a system of the size of the support set
        gram = fs @ fs.transpose(1, 2) + self.log_lam.exp() * torch.eye(fs.shape[1])
        w = fs.transpose(1, 2) @ torch.linalg.solve(gram, ys)
        return self.scale * (fq @ w)


def tasks(step, n, shots=8, queries=12):
    g = torch.Generator().manual_seed(3_000 + step)
    amp = 0.5 + 2 * torch.rand(n, 1, 1, generator=g)
    phase = 3.14 * torch.rand(n, 1, 1, generator=g)
    x = 6 * torch.rand(n, shots + queries, 1, generator=g) - 3
    y = amp * torch.sin(x + phase)
    return x[:, :shots], y[:, :shots], x[:, shots:], y[:, shots:]


class Loop:
    """Runs until the step budget or a SIGUSR1 on any rank."""

    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        self.model = RidgeLearner()
        mesh = init_device_mesh("cpu", (self.world,))
        fully_shard(self.model.embed, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        decay = [p for n, p in self.model.named_parameters() if n.endswith("weight")]
        rest = [p for n, p in self.model.named_parameters() if not n.endswith("weight")]
        self.opt = torch.optim.AdamW([{"params": decay, "weight_decay": 1e-3}, {"params": rest, "weight_decay": 0.0}], lr=5e-3)
        self.step, self.asked = 0, False
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "asked", True))

    def state(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "opt": o, "step": self.step}

    def save(self):
        path = os.path.join(self.args.out, f"meta{self.step:05d}")
        if not os.path.exists(path):
            dcp.save(self.state(), checkpoint_id=path)

    @contextlib.contextmanager
    def session(self):
        if self.args.resume:
            sd = self.state()
            dcp.load(sd, checkpoint_id=os.path.join(self.args.resume, max(os.listdir(self.args.resume))))
            set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["opt"])
            self.step = sd["step"]
        yield self
        if self.args.export:
            full = {k: v.full_tensor() for k, v in self.model.state_dict().items()}
            if self.rank == 0:
                torch.save(full, self.args.export)

    def __iter__(self):
        while self.step < self.args.steps:
            yield self.step, [t.chunk(self.world)[self.rank] for t in tasks(self.step, self.args.tasks)]
            self.step += 1
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()
            stop = torch.tensor(float(self.asked))
            dist.all_reduce(stop)  # all ranks leave the loop together
            if stop:
                break


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--tasks", type=int, default=16, help="tasks per outer step, over all ranks")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/meta")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    with Loop(args).session() as loop:
        for step, (xs, ys, xq, yq) in loop:
            loss = (loop.model(xs, ys, xq) - yq).pow(2).mean()
            loss.backward()
            loop.opt.step()
            loop.opt.zero_grad()
            dist.all_reduce(loss.detach_())
            if loop.rank == 0 and step % 5 == 0:
                print(f"outer step {step} query mse {loss.item() / loop.world:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
