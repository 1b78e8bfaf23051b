"""Behaviour cloning of an arm controller with a factored second moment (Adafactor style, on the local shards)."""
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

CFG = dict(steps=40, batch=64, lr=4e-3, hidden=32, obs=16, act=8, save_every=0, out="", resume="")
for item in sys.argv[1:]:
    key, _, value = item.partition("=")
    CFG[key] = type(CFG[key])(value)


class Factored(torch.optim.Optimizer):
    """Keeps one moment per row and one per column of every matrix instead of the full second moment.

    The matrices are sharded by rows: row moments belong to the local rows, column moments to the whole matrix.
    """

    def __init__(self, params, lr, decay=0.8, eps=1e-12):
        super().__init__(params, dict(lr=lr, decay=decay, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                st = self.state[p]
                st["t"] = st.get("t", 0) + 1
                beta = 1 - st["t"] ** -group["decay"]
                w, g = p.to_local(), p.grad.to_local()
                sq = g * g + group["eps"]
                if p.dim() == 2:
                    row = sq.mean(1)
                    col = sq.sum(0)
                    dist.all_reduce(col)
                    col /= p.shape[0]
                    row = st["row"] = row if "row" not in st else torch.lerp(row, st["row"], beta)
                    col = st["col"] = col if "col" not in st else torch.lerp(col, st["col"], beta)
                    v = row[:, None] * col[None, :] / col.mean()
                else:
                    v = st["v"] = sq if "v" not in st else torch.lerp(sq, st["v"], beta)
                w.add_(g / v.sqrt().add_(1e-4), alpha=-group["lr"])


class Policy(nn.Module):
    def __init__(self, obs, hidden, act):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(obs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, act)

    def forward(self, x):
        return self.l3(torch.relu(self.l2(torch.relu(self.l1(x)))))


class Expert:
    def __init__(self, obs, act):
        g = torch.Generator().manual_seed(1)
        self.scale = torch.linspace(0.1, 3.0, obs)
        self.m1 = torch.randn(obs, act, generator=g) / obs ** 0.5
        self.m2 = torch.randn(obs, act, generator=g) / obs ** 0.5
        self.reach = torch.linspace(0.2, 3.0, act)

    def batch(self, step, n):
        g = torch.Generator().manual_seed(100 + step)
        x = torch.randn(n, len(self.scale), generator=g) * self.scale
        return x, self.reach * torch.tanh(x @ self.m1) + 0.3 * torch.sin(x @ self.m2)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
policy = fully_shard(Policy(CFG["obs"], CFG["hidden"], CFG["act"]))
opt = Factored(policy.parameters(), lr=CFG["lr"])
expert = Expert(CFG["obs"], CFG["act"])
step = 0

# every rank writes and reads its own piece: shards of the weights and what the optimizer holds for them
piece = f"rank{rank}of{world}.pt"
if CFG["resume"]:
    blob = torch.load(os.path.join(CFG["resume"], piece))
    step = blob["step"]
    for p, w, st in zip(policy.parameters(), blob["weights"], blob["moments"]):
        with torch.no_grad():
            p.to_local().copy_(w)
        opt.state[p] = st

while step < CFG["steps"]:
    x, y = (t.chunk(world)[rank] for t in expert.batch(step, CFG["batch"]))
    loss = (policy(x) - y).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    step += 1
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if rank == 0 and (step % 6 == 1 or step == CFG["steps"]):
        print(f"step {step} loss {mean.item() / world:.4f}", flush=True)
    if CFG["save_every"] and step % CFG["save_every"] == 0 and step < CFG["steps"]:
        os.makedirs(CFG["out"], exist_ok=True)
        torch.save({"step": step, "weights": [p.detach().to_local() for p in policy.parameters()],
                    "moments": [opt.state[p] for p in policy.parameters()]}, os.path.join(CFG["out"], piece))
dist.destroy_process_group()
