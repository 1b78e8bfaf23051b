"""Inverse problem: find the conductivity of a rod from sensor readings, with a physics-informed network."""
import argparse
import glob
import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from model import FieldNet, HeatEquation
from sampling import TRUE_K, points


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=200)
    ap.add_argument("--points", type=int, default=128)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume")
    return ap.parse_args()


def newest(folder):
    return max(glob.glob(os.path.join(folder, "it*")), key=lambda p: int(re.search(r"it(\d+)$", p).group(1)))


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(11)
    net = FieldNet()
    fully_shard(net)
    equation = HeatEquation()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    opt_k = torch.optim.Adam(equation.parameters(), lr=2e-2)

    start = 0
    if args.resume:
        path = newest(args.resume)
        m, o = get_state_dict(net, opt)
        state = {"net": m, "opt": o}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(net, opt, model_state_dict=state["net"], optim_state_dict=state["opt"])
        small = torch.load(os.path.join(path, f"equation_{rank}.pt"))
        equation.load_state_dict(small["equation"])
        opt_k.load_state_dict(small["opt_k"])
        start = small["step"]

    for step in range(start, args.steps):
        inner, sensors, readings = (t.chunk(world)[rank] for t in points(step, args.points))
        u_t, u_xx, u = net(inner, sensors)
        pde = equation(u_t, u_xx).square().mean()
        fit = (u - readings).square().mean()
        loss = fit + 0.1 * pde
        opt.zero_grad()
        opt_k.zero_grad()
        loss.backward()
        dist.all_reduce(equation.log_k.grad)
        equation.log_k.grad /= world
        opt.step()
        opt_k.step()

        if (step + 1) % 20 == 0:
            shown = torch.stack([fit, pde]).detach()
            dist.all_reduce(shown)
            shown /= world
            if rank == 0:
                print(f"step {step + 1} fit {shown[0]:.5f} pde {shown[1]:.5f} k {equation.k.item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            path = os.path.join(args.out, f"it{step + 1}")
            m, o = get_state_dict(net, opt)
            dcp.save({"net": m, "opt": o}, checkpoint_id=path)
            torch.save({"equation": equation.state_dict(), "opt_k": opt_k.state_dict(), "step": step + 1},
                       os.path.join(path, f"equation_{rank}.pt"))
            dist.barrier()

    if rank == 0:
        print(f"conductivity {equation.k.item():.5f} (true {TRUE_K})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
