import argparse

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import snapshots
import task
from sampler import LossPrioritySampler


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = task.data()
    net = task.model()
    opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
    sampler = LossPrioritySampler(len(x), batch=48)
    step = snapshots.restore(args.resume, net, opt, sampler) if args.resume else 0

    while step < args.steps:
        ids, weight = sampler.draw()
        mine, w = ids[rank::world], weight[rank::world]
        each = (net(x[mine]) - y[mine]).square().squeeze(1)
        opt.zero_grad()
        (each * w).mean().backward()
        opt.step()
        sampler.report(ids, each.detach(), rank, world)
        step += 1
        if args.out and args.save_every and step % args.save_every == 0:
            snapshots.take(args.out, step, net, opt, sampler)
        part = (each * w).detach().mean() / world
        dist.all_reduce(part)
        if rank == 0:
            print(
                f"step {step:3d} weighted loss {part.item():.4f} largest score {sampler.score.max().item():.3f}",
                flush=True,
            )

    if args.export:
        full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
