"""Two tasks with conflicting gradients: projection (PCGrad) on the sharded, already averaged gradients."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class Net(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, d), nn.GELU(), nn.Linear(d, d), nn.GELU())
        self.cls, self.reg = nn.Linear(d, 4), nn.Linear(d, 2)

    def forward(self, x):
        h = self.trunk(x)
        return self.cls(h), self.reg(h)


def local_grads(loss_fn, model, opt):
    """Loss and averaged gradient of one task: clones of the local shards (zeros where the task has none)."""
    opt.zero_grad()
    loss = loss_fn()
    loss.backward()
    return loss.detach(), [
        torch.zeros_like(p.to_local()) if p.grad is None else p.grad.to_local().clone() for p in model.parameters()
    ]


def global_dots(a, b):
    """<a,b>, <a,a>, <b,b> over all shards of all ranks."""
    d = torch.zeros(3, dtype=torch.float64)
    for x, y in zip(a, b):
        x, y = x.double(), y.double()
        d += torch.stack([(x * y).sum(), (x * x).sum(), (y * y).sum()])
    dist.all_reduce(d)
    return d.tolist()


def surgery(a, b):
    ab, aa, bb = global_dots(a, b)
    if ab >= 0:
        return [x + y for x, y in zip(a, b)], ab
    ca, cb = 1 - ab / aa, 1 - ab / bb  # a - (ab/bb) b  +  b - (ab/aa) a
    return [ca * x + cb * y for x, y in zip(a, b)], ab


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--export", default="")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Net()
    fully_shard(model.trunk)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.8)
    g0 = torch.Generator().manual_seed(2)
    X = torch.randn(512, 20, generator=g0)
    Y = (X @ torch.randn(20, 4, generator=g0)).argmax(1)
    R = torch.tanh(X @ torch.randn(20, 2, generator=g0)) - 0.5 * (Y[:, None] % 2)
    conflicts = 0
    for step in range(a.steps):
        idx = torch.randint(0, 512, (a.batch,), generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        l1, g_cls = local_grads(lambda: F.cross_entropy(model(X[idx])[0], Y[idx]), model, opt)
        l2, g_reg = local_grads(lambda: 4 * F.mse_loss(model(X[idx])[1], R[idx]), model, opt)
        mixed, dot = surgery(g_cls, g_reg)
        conflicts += dot < 0
        for q, g in zip(model.parameters(), mixed):
            if q.grad is None:
                q.grad = torch.zeros_like(q)
            q.grad.to_local().copy_(g)
        opt.step()
        log = torch.stack([l1, l2]) / world
        dist.all_reduce(log)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} cls {log[0]:.5f} reg {log[1]:.5f} conflicts {conflicts}", flush=True)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and a.export:
        torch.save(full, a.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
