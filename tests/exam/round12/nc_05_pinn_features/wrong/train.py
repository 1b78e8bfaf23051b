import argparse
from dataclasses import dataclass
from typing import Optional

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import store
from net import FourierNet
from physics import pinn_loss, solution_error
from points import draw


@dataclass
class Run:
    seed: int = 13
    steps: int = 50
    lr: float = 5e-3
    out: Optional[str] = None
    save_every: int = 8
    resume: Optional[str] = None


def main(run: Run):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(run.seed + rank)
    net = FourierNet()
    fully_shard(net, mesh=init_device_mesh("cpu", (world,)))
    opt = torch.optim.Adam(net.parameters(), lr=run.lr)
    step = store.load(run.resume, net, opt) if run.resume else 0
    while step < run.steps:
        inner, border = draw(step, rank, world, run.seed)
        loss = pinn_loss(net, inner, border)
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % 7 == 1:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item():.5f}", flush=True)
        if run.out and step % run.save_every == 0:
            store.save(run.out, step, net, opt)
    error = solution_error(net)
    if rank == 0:
        print(f"rms error of the solution {error.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=8)
    ap.add_argument("--resume")
    main(Run(**vars(ap.parse_args())))
