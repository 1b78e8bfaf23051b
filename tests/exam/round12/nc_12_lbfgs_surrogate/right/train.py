"""Full-batch fit of a smooth surrogate with a quasi-Newton method in float64."""
import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lbfgs import LBFGS
from surrogate import airfoil_table, network


class Objective:
    """Mean squared error over the whole table; every rank holds a block of the rows."""

    def __init__(self, net, rank, world):
        x, y = airfoil_table()
        self.net, self.world = net, world
        self.x, self.y = x.chunk(world)[rank], y.chunk(world)[rank]

    def _share(self):
        return (self.net(self.x) - self.y).square().mean()

    def _over_ranks(self, loss):
        value = loss.detach() / self.world
        dist.all_reduce(value)
        return value.item()

    def value(self):
        with torch.no_grad():
            return self._over_ranks(self._share())

    def value_and_grad(self):
        self.net.zero_grad()
        loss = self._share()
        loss.backward()
        return self._over_ranks(loss)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--iterations", type=int, default=24)
    ap.add_argument("--keep", help="folder for the state of each rank")
    ap.add_argument("--every", type=int, default=5)
    ap.add_argument("--resume", help="folder of an earlier run on as many ranks")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # the line search moves the shards between two forwards, so nothing may stay gathered after a forward
    net = fully_shard(network(), mesh=init_device_mesh("cpu", (world,)), reshard_after_forward=True)
    objective, solver = Objective(net, rank, world), LBFGS(net.parameters())

    k = 0
    if args.resume:
        k = max(int(d) for d in os.listdir(args.resume))
        blob = torch.load(os.path.join(args.resume, str(k), f"{rank}of{world}.pt"))
        solver.move(blob["point"])
        solver.load_state_dict(blob["solver"])
    while k < args.iterations:
        loss = solver.step(objective.value_and_grad, objective.value)
        if rank == 0 and k % 3 == 0:
            print(f"iteration {k} loss {loss:.8f}", flush=True)
        k += 1
        if args.keep and k % args.every == 0:
            folder = os.path.join(args.keep, str(k))
            os.makedirs(folder, exist_ok=True)
            torch.save({"point": solver.point(), "solver": solver.state_dict()}, os.path.join(folder, f"{rank}of{world}.pt"))
    final = objective.value()
    if rank == 0:
        print(f"final loss {final:.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
