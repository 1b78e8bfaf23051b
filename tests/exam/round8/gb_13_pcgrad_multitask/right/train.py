import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from pcgrad import PCGrad

TASKS = ("regress", "classify", "rank")


class Trunk(nn.Module):
    def __init__(self, n_in=16, width=40):
        super().__init__()
        self.a = nn.Linear(n_in, width)
        self.b = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.norm(h + torch.tanh(self.b(h)))


class MultiTask(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.trunk = Trunk(width=width)
        self.heads = nn.ModuleDict({"regress": nn.Linear(width, 2), "classify": nn.Linear(width, 4),
                                    "rank": nn.Linear(width, 1)})

    def forward(self, x, task):
        return self.heads[task](self.trunk(x))


def sample(step, n):
    fixed = torch.Generator().manual_seed(0)
    w1, w2, w3 = (torch.randn(16, k, generator=fixed) for k in (2, 4, 1))
    g = torch.Generator().manual_seed(10 + step)
    x = torch.randn(n, 16, generator=g)
    return {"x": x, "regress": torch.sin(x @ w1), "classify": (x @ w2).argmax(1),
            "rank": (-(x @ w3).squeeze(1) + 0.1 * torch.randn(n, generator=g))}


def task_loss(task, out, target):
    if task == "regress":
        return F.mse_loss(out, target)
    if task == "classify":
        return F.cross_entropy(out, target)
    # neighbouring examples (0, 1), (2, 3), ... make the pairs; batches are divided at even places
    s, t = out.squeeze(1).view(-1, 2), target.view(-1, 2)
    sign = torch.sign(t[:, 0] - t[:, 1])
    return F.softplus(-sign * (s[:, 0] - s[:, 1])).mean()


def like(p, local):
    """A gradient with the sharding of parameter p made from local shards."""
    if isinstance(p, DTensor):
        return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
    return local


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="mtl")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(30)
    model = MultiTask()
    fully_shard(model.trunk)
    for head in model.heads.values():
        fully_shard(head)
    fully_shard(model)
    opt = torch.optim.Adam([{"params": model.trunk.parameters(), "lr": 3e-3},
                            {"params": model.heads.parameters(), "lr": 1e-2}], eps=1e-6)
    surgery = PCGrad(model.trunk.parameters(), seed=31)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    step, conflicts = 0, 0

    if args.resume:
        best = max((f for f in os.listdir(args.resume) if f.endswith(".pt")), key=lambda f: int(f[:-3]))
        ck = torch.load(os.path.join(args.resume, best))
        set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["opt"], options=whole)
        surgery.gen.set_state(ck["order_rng"])
        step, conflicts = ck["step"], ck["conflicts"]

    while step < args.steps:
        data = {k: v.chunk(world)[rank] for k, v in sample(step, args.batch).items()}
        grads, losses = [], []
        for task in TASKS:
            loss = task_loss(task, model(data["x"], task), data[task])
            loss.backward()
            grads.append(surgery.take())
            losses.append(loss.detach())
        conflicts += surgery.put(grads, like)
        opt.step()
        opt.zero_grad()
        step += 1
        log = torch.stack(losses)
        dist.all_reduce(log)
        if rank == 0 and step % 4 == 0:
            print(f"step {step} " + " ".join(f"{t} {v / world:.5f}" for t, v in zip(TASKS, log.tolist()))
                  + f" conflicts {conflicts}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt, options=whole)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"model": m, "opt": o, "order_rng": surgery.gen.get_state(), "step": step,
                            "conflicts": conflicts}, os.path.join(args.out, f"{step}.pt"))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
