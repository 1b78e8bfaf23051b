import argparse
import os
import pickle

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lbfgs import ShardedLBFGS
from surrogate import Surrogate, simulate


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(13)
    model = Surrogate().double()
    fully_shard(model.core, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = ShardedLBFGS(model.parameters())

    # 250 rows do not divide evenly: the loss is a sum of squares over the count of all rows
    x, y = simulate(250, seed=1)
    count = y.numel()
    xs, ys = x.tensor_split(world)[rank], y.tensor_split(world)[rank]
    test_x, test_y = (t.tensor_split(world)[rank] for t in simulate(500, seed=2))

    def local_loss():
        return F.mse_loss(model(xs), ys, reduction="sum") / count

    def reduced(value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item()

    @torch.no_grad()
    def evaluate():
        """Global training loss; leaves no gathered weights behind, as the next trial changes the shards."""
        value = reduced(local_loss())
        model.reshard()
        return value

    def write(step):
        os.makedirs(args.out, exist_ok=True)
        state = {"step": step, "weights": optimizer.flat([p.detach() for p in optimizer.params]), "lbfgs": optimizer.state_dict()}
        with open(os.path.join(args.out, f"{rank}-{world}-{step:05d}.pkl"), "wb") as f:
            pickle.dump(state, f)
        dist.barrier()

    start = 0
    if args.resume:
        mine = sorted(n for n in os.listdir(args.resume) if n.startswith(f"{rank}-{world}-"))
        with open(os.path.join(args.resume, mine[-1]), "rb") as f:
            state = pickle.load(f)
        optimizer.set_flat(state["weights"])
        optimizer.load_state_dict(state["lbfgs"])
        start = state["step"]

    for step in range(start + 1, args.steps + 1):
        part = local_loss()
        (part * world).backward()
        loss = reduced(part)
        t = optimizer.step(loss, evaluate)
        for p in optimizer.params:
            p.grad = None
        if rank == 0 and step % 8 == 0:
            print(f"step {step} loss {loss:.6f} accepted t {t:.3g}", flush=True)
        if args.save_every and step % args.save_every == 0:
            write(step)

    with torch.no_grad():
        error = reduced(F.mse_loss(model(test_x), test_y, reduction="sum")) / (500 * 2)
    if rank == 0:
        print(f"test mse {error:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
