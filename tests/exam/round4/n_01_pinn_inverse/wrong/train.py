"""Inverse heat equation: fit u(x, t) to noisy sensors and recover the diffusivity."""
import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import problem
import store
from net import HeatPhysics, JetNet


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=36)
    p.add_argument("--colloc", type=int, default=128)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--weight", type=float, default=0.5)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="runs/heat")
    p.add_argument("--resume")
    p.add_argument("--export")
    return p.parse_args()


def my_part(t, rank, world):
    n = t.shape[0] // world
    return t[rank * n:(rank + 1) * n]


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.set_num_threads(1)
    torch.manual_seed(0)

    net = JetNet()
    for b in net.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(net, mesh=mesh)
    # 0-dim parameters cannot be sharded, so the physics stays an ordinary module
    physics = HeatPhysics()

    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    popt = torch.optim.Adam(physics.parameters(), lr=10 * args.lr)
    start = store.load(args.resume, net, opt, physics, popt) if args.resume else 0

    xs, us = problem.sensors()
    xs, us = my_part(xs, rank, world), my_part(us, rank, world)
    for step in range(start, args.steps):
        xc = my_part(problem.collocation(step, args.colloc), rank, world)
        jet = net(torch.cat([xs, xc]))
        data = (jet[0][:len(xs)] - us).pow(2).mean()
        pde = physics.residual([z[len(xs):] for z in jet]).pow(2).mean()
        loss = data + args.weight * pde
        loss.backward()
        opt.step()
        popt.step()
        opt.zero_grad()
        popt.zero_grad()

        shown = torch.stack([data.detach(), pde.detach()])
        dist.all_reduce(shown)
        if rank == 0 and (step % 5 == 0 or step + 1 == args.steps):
            d, r = (shown / world).tolist()
            print(f"step {step:3d} data {d:.5f} pde {r:.5f} kappa {physics.log_kappa.exp().item():.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            store.save(args.out, step + 1, net, opt, physics, popt)

    if args.export:
        sd = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save({"net": sd, "kappa": physics.log_kappa.exp().item()}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
