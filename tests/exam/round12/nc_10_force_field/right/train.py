import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from checkpointing import TrainingState
from clusters import make_clusters
from potential import PairPotential

STEPS, BATCH, FORCE_WEIGHT = 48, 16, 2.0


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    # one group for the whole net: forward differentiates through all of it
    net = fully_shard(PairPotential(), mesh=init_device_mesh("cpu", (world,)))
    optim = torch.optim.Adam(net.parameters(), lr=4e-3)
    state = TrainingState(net, optim)
    if args.resume:
        state.load(args.resume)

    pos, energy, force = make_clusters(160, seed=3)
    energy = energy - energy.mean()
    while state.step < STEPS:
        g = torch.Generator().manual_seed(600 + state.step)
        ids = torch.randperm(len(pos), generator=g)[:BATCH][rank::world]
        e, f = net(pos[ids])
        loss = (e - energy[ids]).square().mean() + FORCE_WEIGHT * (f - force[ids]).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        state.step += 1
        if state.step % 6 == 1:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {state.step} loss {mean.item():.5f}", flush=True)
        if args.out and state.step % args.save_every == 0:
            state.save(args.out)

    net.eval()
    _, f = net(pos[rank::world])
    worst = (f.detach() - force[rank::world]).abs().max()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    if rank == 0:
        print(f"largest force error {worst.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=9)
    ap.add_argument("--resume")
    main(ap.parse_args())
