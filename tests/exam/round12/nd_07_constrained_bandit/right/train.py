"""Primal-dual training of a dosing policy under a budget for the mean cost.

The policy minimises  -reward + lam * (cost - budget);  lam follows the violation of the budget.
"""
import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from env import Dosing
from policy import GaussianPolicy


class PrimalDual:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.env = Dosing()
        torch.manual_seed(21)
        self.policy = GaussianPolicy(self.env.context, len(self.env.tox))
        fully_shard(self.policy.body)
        fully_shard(self.policy)
        self.opt = torch.optim.Adam(self.policy.parameters(), lr=args.lr, eps=1e-6)
        self.lam, self.step = 0.0, 0

    def mean(self, *values):
        packed = torch.stack([v.detach() for v in values])
        dist.all_reduce(packed)
        return (packed / self.world).tolist()

    def update(self):
        x = self.env.contexts(self.step, self.args.batch)
        noise = torch.randn(len(x), len(self.env.tox), generator=torch.Generator().manual_seed(self.step))
        x, noise = x.chunk(self.world)[self.rank], noise.chunk(self.world)[self.rank]
        dose = self.policy(x, noise)
        reward, cost = self.env.reward(x, dose).mean(), self.env.cost(dose).mean()
        loss = -reward + self.lam * (cost - self.args.budget)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        reward, cost, loss = self.mean(reward, cost, loss)
        self.lam = max(0.0, self.lam + self.args.dual_lr * (cost - self.args.budget))
        self.step += 1
        return loss, reward, cost

    def save(self):
        model, optim = get_state_dict(self.policy, self.opt)
        state = {"model": model, "optim": optim, "step": self.step, "lam": self.lam}
        dcp.save(state, checkpoint_id=os.path.join(self.args.out, f"{self.step:06d}"))

    def resume(self, root):
        model, optim = get_state_dict(self.policy, self.opt)
        state = {"model": model, "optim": optim, "step": self.step, "lam": self.lam}
        dcp.load(state, checkpoint_id=max(glob.glob(os.path.join(root, "[0-9]*"))))
        set_state_dict(self.policy, self.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]
        self.lam = state["lam"]


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=55)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--dual-lr", type=float, default=0.1)
    ap.add_argument("--budget", type=float, default=0.8)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default=".")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    pd = PrimalDual(args)
    if args.resume:
        pd.resume(args.resume)
    while pd.step < args.steps:
        loss, reward, cost = pd.update()
        if pd.rank == 0 and (pd.step % 8 == 1 or pd.step == args.steps):
            print(f"{pd.step:3d} loss {loss:.4f} reward {reward:.4f} cost {cost:.4f} lam {pd.lam:.4f}", flush=True)
        if args.save_every and pd.step % args.save_every == 0 and pd.step < args.steps:
            pd.save()
    dist.destroy_process_group()
