"""Few-shot meta-learning with a differentiable ridge-regression head (R2-D2, Bertinetto et al., 2019).

The embedding is sharded. The head has no weights: it is solved in closed form for every task, and the
gradient flows through the solution. Three scalars that adjust the solver are plain replicated parameters
with an optimizer of their own; their gradients are averaged by hand.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class Embedding(nn.Module):
    def __init__(self, inputs=10, width=32, out=12):
        super().__init__()
        self.inp = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(2))
        self.out = nn.Linear(width, out)

    def forward(self, x):
        h = self.inp(x)
        for block in self.blocks:
            h = h + block(h)
        return self.out(h)


class RidgeSolver(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_lam = nn.Parameter(torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, support, target, query):
        """All of shape (tasks, shots, features); solved in the dual, shots x shots."""
        eye = torch.eye(support.shape[1])
        gram = support @ support.transpose(1, 2) + self.log_lam.exp() * eye
        w = support.transpose(1, 2) @ torch.linalg.solve(gram, target)
        return self.scale * (query @ w) + self.shift


def sample_tasks(gen, tasks, shots=5, queries=5, ways=3):
    """Classification tasks: `ways` classes that differ in a nonlinear feature of the input."""
    mix = torch.randn(10, 10, generator=torch.Generator().manual_seed(77)) / 3
    centre = 1.5 * torch.randn(tasks, ways, 1, 10, generator=gen)
    z = centre + 0.5 * torch.randn(tasks, ways, shots + queries, 10, generator=gen)
    x = torch.sin(z @ mix) + 0.3 * (z @ mix.t())
    y = torch.arange(ways).view(1, ways, 1).expand(tasks, ways, shots + queries)
    split = lambda t: (t[:, :, :shots].flatten(1, 2), t[:, :, shots:].flatten(1, 2))
    (xs, xq), (ys, yq) = split(x), split(y)
    return xs, ys, xq, yq


class MetaLearner:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(10)
        self.embed, self.solver = Embedding(), RidgeSolver()
        for block in self.embed.blocks:
            fully_shard(block)
        fully_shard(self.embed)
        self.opt = torch.optim.AdamW(self.embed.parameters(), lr=3e-3)
        self.solver_opt = torch.optim.SGD(self.solver.parameters(), lr=0.1, momentum=0.8)
        self.gen = torch.Generator().manual_seed(2024)
        self.step = 0

    def my_tasks(self, gen, tasks):
        return [t.chunk(self.world)[self.rank] for t in sample_tasks(gen, tasks)]

    def predict(self, xs, ys, xq):
        # one pass of the embedding for support and query
        n = xs.shape[1]
        both = torch.cat([xs, xq], 1)
        h = self.embed(both.flatten(0, 1)).unflatten(0, both.shape[:2])
        onehot = F.one_hot(ys, 3).to(h.dtype) * 2 - 1
        return self.solver(h[:, :n], onehot, h[:, n:])

    def train_step(self):
        xs, ys, xq, yq = self.my_tasks(self.gen, self.args.tasks)
        loss = F.cross_entropy(self.predict(xs, ys, xq).flatten(0, 1), yq.flatten())
        loss.backward()
        flat = torch.stack([p.grad for p in self.solver.parameters()] + [loss.detach()])
        dist.all_reduce(flat)
        flat /= self.world
        for p, g in zip(self.solver.parameters(), flat):
            p.grad.copy_(g)
        nn.utils.clip_grad_norm_(self.embed.parameters(), 1.0)
        for opt in (self.opt, self.solver_opt):
            opt.step()
            opt.zero_grad()
        self.step += 1
        return flat[-1].item()

    @torch.no_grad()
    def evaluate(self, tasks=16):
        xs, ys, xq, yq = self.my_tasks(torch.Generator().manual_seed(1), tasks)
        hits = (self.predict(xs, ys, xq).argmax(-1) == yq).double().sum()
        dist.all_reduce(hits)
        return hits.item() / (tasks * 15)

    def state_dict(self):
        embed, opt = get_state_dict(self.embed, self.opt)
        moments = {n: self.solver_opt.state[p].get("momentum_buffer", torch.zeros(())) for n, p in self.solver.named_parameters()}
        return {"embed": embed, "opt": opt, "solver": self.solver.state_dict(), "solver_momentum": moments,
                "gen": self.gen.get_state(), "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.embed, self.opt, model_state_dict=state["embed"], optim_state_dict=state["opt"])
        self.solver.load_state_dict(state["solver"])
        for n, p in self.solver.named_parameters():
            self.solver_opt.state[p]["momentum_buffer"] = state["solver_momentum"][n]
        self.gen.set_state(state["gen"])
        self.step = state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=15)
    ap.add_argument("--tasks", type=int, default=8)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="meta")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    learner = MetaLearner(args)
    if args.resume:
        state = learner.state_dict()
        dcp.load(state, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        learner.load_state_dict(state)
    while learner.step < args.steps:
        loss = learner.train_step()
        if learner.step % 5 == 0:
            acc = learner.evaluate()
            if learner.rank == 0:
                print(f"step {learner.step} loss {loss:.4f} query accuracy {acc:.3f}")
        if args.save_every and learner.step % args.save_every == 0:
            dcp.save(learner.state_dict(), checkpoint_id=os.path.join(args.out, f"meta_{learner.step:05d}"))
    if args.export:
        full = {k: v.full_tensor() for k, v in learner.embed.state_dict().items()}
        full.update({f"solver.{k}": v for k, v in learner.solver.state_dict().items()})
        if learner.rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
