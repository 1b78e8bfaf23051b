"""Barlow Twins on 8x8 textures.

The cross-correlation matrix is a function of first and second moments over the *global* batch. Each rank adds its own
moments, the sums are exchanged as plain data, and every rank then evaluates the same scalar. d(loss)/d(theta) is the
sum over ranks of what each rank back-propagates through its own contribution, so gradients are added, not averaged.
"""
import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

DIM, GLOBAL_BATCH, STEPS = 16, 32, 40


def exchange(local):
    total = local.detach().clone()
    dist.all_reduce(total)
    return local + (total - local.detach())


def barlow_loss(za, zb, n, lam=0.02):
    za, zb = za.double(), zb.double()
    packed = torch.cat([za.sum(0), zb.sum(0), (za * za).sum(0), (zb * zb).sum(0), (za.T @ zb).flatten()])
    packed = exchange(packed) / n
    ma, mb, qa, qb, cross = packed.split([DIM, DIM, DIM, DIM, DIM * DIM])
    sa = (qa - ma * ma + 1e-3).sqrt()
    sb = (qb - mb * mb + 1e-3).sqrt()
    c = (cross.view(DIM, DIM) - torch.outer(ma, mb)) / torch.outer(sa, sb)
    on = (1 - c.diagonal()).pow(2).sum()
    off = c.pow(2).sum() - c.diagonal().pow(2).sum()
    return on + lam * off


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU())
        self.project = nn.Linear(48, DIM)

    def forward(self, x):
        return self.project(self.trunk(x.flatten(1)))


def sample(step, rank, world):
    g = torch.Generator().manual_seed(1000 + step)
    bank = torch.randn(24, 8, 8, generator=torch.Generator().manual_seed(5))
    base = bank[torch.randint(24, (GLOBAL_BATCH,), generator=g)]
    base = base + 0.5 * bank[torch.randint(24, (GLOBAL_BATCH,), generator=g)]
    a = base + 0.3 * torch.randn(base.shape, generator=g)
    b = base + 0.3 * torch.randn(base.shape, generator=g)
    per = GLOBAL_BATCH // world
    return a[rank * per:(rank + 1) * per], b[rank * per:(rank + 1) * per]


def main():
    ap = ArgumentParser()
    ap.add_argument("--save_dir")
    ap.add_argument("--save_step", type=int, default=15)
    ap.add_argument("--load_dir")
    opts = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    net = Net()
    fully_shard(net.trunk)
    fully_shard(net)
    for m in net.modules():
        if isinstance(m, FSDPModule):
            m.set_force_sum_reduction_for_comms(True)
            m.set_gradient_divide_factor(1.0)
    optim = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    step = 0
    if opts.load_dir:
        model_sd, optim_sd = get_state_dict(net, optim)
        blob = {"net": model_sd, "optim": optim_sd, "step": 0}
        dcp.load(blob, checkpoint_id=os.path.join(opts.load_dir, "barlow"))
        set_state_dict(net, optim, model_state_dict=blob["net"], optim_state_dict=blob["optim"])
        step = blob["step"]

    while step < STEPS:
        a, b = sample(step, rank, world)
        loss = barlow_loss(net(a), net(b), GLOBAL_BATCH)
        optim.zero_grad()
        loss.backward()
        optim.step()
        step += 1
        if rank == 0 and (step == 1 or step % 8 == 0):
            print(f"step {step} loss {loss.item():.6f}", flush=True)
        if opts.save_dir and step == opts.save_step:
            model_sd, optim_sd = get_state_dict(net, optim)
            dcp.save({"net": model_sd, "optim": optim_sd, "step": step},
                     checkpoint_id=os.path.join(opts.save_dir, "barlow"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
